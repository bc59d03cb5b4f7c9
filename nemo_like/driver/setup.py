"""Puts the concrete parts together, runs the driver, and ends every process again.

The only module that knows all parts. Every process starts at once, since most of the start-up is
imports; nothing here imports what a process needs, so the driver's own stays light.
"""

from __future__ import annotations
