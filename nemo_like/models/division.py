"""Checks that the parts of a model can be divided evenly."""

from __future__ import annotations

import math
from collections.abc import Iterator

from nemo_like.config.problems import Problem


def must_divide(key: str, size: int, parts: dict[str, int]) -> Iterator[Problem]:
    """Yield a problem unless ``size``, the value of ``key``, divides the counts of all ``parts``."""
    uneven = [f"{count} {name}" for name, count in parts.items() if size >= 1 and count % size]
    if uneven:
        yield Problem(
            key=f"{key}={size}",
            rule=f"must divide the model's {' and its '.join(uneven)}",
            remedy=f"try {nearest_divisors(math.gcd(*parts.values()), size)}",
        )


def nearest_divisors(count: int, size: int) -> str:
    """Return the divisors of ``count`` next to ``size`` on either side, as "4 or 8"."""
    divisors = [number for number in range(1, count + 1) if count % number == 0]
    below = [number for number in divisors if number < size]
    above = [number for number in divisors if number > size]
    return " or ".join(str(number) for number in below[-1:] + above[:1])
