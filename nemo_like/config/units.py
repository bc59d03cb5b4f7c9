"""Formats sizes, and reads durations."""

from __future__ import annotations

import re


def format_size(num_bytes: float) -> str:
    """Return a size in decimal units with four digits, such as "4.931 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} TB"


_DURATION = re.compile(r"(\d+):(\d{1,2}):(\d{1,2}):(\d{1,2})")
_FORM = "DD:HH:MM:SS, with at most 23 hours, 59 minutes and 59 seconds"


def parse_duration_s(text: str) -> int:
    """Return the seconds of a duration DD:HH:MM:SS. Raises ValueError for any other form."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(f"{text!r} is not of the form {_FORM}")
    days, hours, minutes, seconds = (int(part) for part in match.groups())
    if hours > 23 or minutes > 59 or seconds > 59:
        raise ValueError(f"{text!r} is not of the form {_FORM}")
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds
