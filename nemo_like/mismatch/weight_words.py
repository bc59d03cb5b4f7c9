"""Digests of single weights, by which those of two processes are compared."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nemo_like.tripwires.weight_digests import word_sum


@dataclass(frozen=True, slots=True)
class WeightWords:
    """Digests by Hugging Face name: of values, and of the bytes that travel."""

    values: dict[str, int]
    sent: dict[str, int]


def weight_word(tensor: Tensor) -> int:
    """Return a digest of a tensor's values in their order; zeros of either sign are alike, since products
    lose the sign."""
    return int(word_sum((tensor.detach() + 0).contiguous()))
