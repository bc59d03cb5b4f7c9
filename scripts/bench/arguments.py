"""What the arguments of benchmarks have in common."""

from __future__ import annotations

import argparse
from collections.abc import Callable


def at_least(least: int) -> Callable[[str], int]:
    """Return the type of an argument that is a whole number from ``least`` on."""

    def number(text: str) -> int:
        if (value := int(text)) < least:
            raise argparse.ArgumentTypeError(f"{value} is too few; the least is {least}")
        return value

    return number
