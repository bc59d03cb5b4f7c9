"""Reads weights in MXFP4, a format of the Open Compute Project: blocks of 32 values of four bits, each block
with a scale."""

from __future__ import annotations

import torch
from torch import Tensor

# By the four bits of a value: a sign, two bits of exponent, and one of mantissa.
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_VALUES = torch.tensor([*_POSITIVE, *(-value for value in _POSITIVE)])


def from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Return the values, which bfloat16 holds exactly.

    blocks: [..., n, 16] uint8, each with two values, of which the lower bits have the first; scales: [..., n]
    uint8, the exponent of 2 plus 127. Returns [..., 32 n].
    """
    values = _VALUES[torch.stack((blocks & 15, blocks >> 4), dim=-1).int()].flatten(-2)
    # As in the exponent of a float32.
    factors = (scales.int() << 23).view(torch.float32)
    return (values * factors[..., None]).flatten(-2).bfloat16()
