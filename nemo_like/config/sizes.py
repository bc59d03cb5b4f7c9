"""Bytes in words."""

from __future__ import annotations


def format_size(num_bytes: float) -> str:
    """Return a size in decimal units with four digits, such as "4.931 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.4g} TB"
