"""Limits how deep foreign JSON may be nested, since code that reads, writes or renders it recurses. Pure."""

from __future__ import annotations

from typing import Any

# Schemas of tools have about two levels for each of their objects. Python allows a thousand recursions.
MAX_LEVELS = 128


def is_shallow(value: Any) -> bool:
    """Return whether lists and objects are nested no deeper than ``MAX_LEVELS``."""
    nested = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_LEVELS):
        nested = [
            part
            for one in nested
            for part in (one.values() if isinstance(one, dict) else one)
            if isinstance(part, dict | list)
        ]
        if not nested:
            return True
    return False
