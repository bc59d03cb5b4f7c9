"""Tool calls in the text of a response: ``{"name": ..., "arguments": {...}}`` in JSON.

Standard library only.
"""

from __future__ import annotations

import json
import re
from typing import Any


class UnreadableCall(ValueError):
    """The text is no tool call."""


def read_call(text: str) -> tuple[str, dict[str, Any]]:
    """Return the name and the arguments of a call. Raises UnreadableCall for any other text."""
    try:
        asked = json.loads(text)
        name, arguments = asked["name"], asked.get("arguments") or {}
        if not isinstance(name, str) or not isinstance(arguments, dict):
            raise TypeError
        json.dumps(arguments, ensure_ascii=False).encode()  # half of a surrogate pair has no UTF-8
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UnreadableCall(text) from error
    return name, arguments


def without_calls(text: str, pattern: re.Pattern[str]) -> tuple[str, int]:
    """Return the text without the calls that can be read, and their number; group 1 of ``pattern`` is a
    call."""
    num_read = 0

    def kept(match: re.Match[str]) -> str:
        nonlocal num_read
        try:
            read_call(match.group(1))
        except UnreadableCall:
            return match.group()
        num_read += 1
        return ""

    return pattern.sub(kept, text), num_read
