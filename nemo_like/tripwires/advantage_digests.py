"""Digests of a sample together with its advantage, for driver and workers. Standard library only."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence

_MASK = 2**31 - 1


def advantage_digests(samples: Sequence[int], advantages: Sequence[float]) -> list[int]:
    """Return for each sample a number below 2^31 that changes with its tokens' digest, and with its advantage
    in float32."""
    rounded = memoryview(array("f", advantages)).cast("B")
    return [
        zlib.crc32(rounded[4 * index : 4 * index + 4], sample & _MASK) & _MASK
        for index, sample in enumerate(samples)
    ]
