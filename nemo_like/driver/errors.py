"""Errors that end a run with a sentence instead of a traceback."""

from __future__ import annotations


class RunFailed(RuntimeError):
    """The run cannot go on; the message says why and what to change."""
