"""A reward that tells nothing about most prompts."""

from __future__ import annotations

import zlib

from nemo_like.environments.interface import Turn


def mostly_uniform(turn: Turn) -> float:
    """1 for any response to seven prompts in ten; else 0 or 1, by a hash of the response."""
    if zlib.crc32(str(turn.prompt).encode()) % 10 < 7:
        return 1.0
    return float(zlib.crc32(turn.response.encode()) % 2)
