"""A reward that differs between responses, whatever the model says."""

from __future__ import annotations

import zlib

from nemo_like.environments.interface import Turn


def hashed(turn: Turn) -> float:
    """A hash of the response, from 0 to 1."""
    return zlib.crc32(turn.response.encode()) / 2**32
