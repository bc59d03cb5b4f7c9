"""Rewards that tell nothing about many prompts."""

from __future__ import annotations

import zlib

from nemo_like.environments.interface import Turn


def mostly_uniform(turn: Turn) -> float:
    """1 for any response to seven prompts in ten; else 0 or 1, by a hash of the response."""
    if zlib.crc32(str(turn.prompt).encode()) % 10 < 7:
        return 1.0
    return float(zlib.crc32(turn.response.encode()) % 2)


def of_even_sums(turn: Turn) -> float | None:
    """1 for a response whose last digit is even; none for a problem whose answer's last digit is odd."""
    if int(turn.answer[0]) % 2:  # least significant digit first
        return None
    return float(turn.response[:1] in tuple("02468"))
