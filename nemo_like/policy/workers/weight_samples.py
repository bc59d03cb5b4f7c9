"""Takes a fixed number of elements of each tensor, which is little for a model of any size."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# At most this many evenly spread elements of each weight tensor are compared.
SAMPLED_ELEMENTS = 4096


@torch.no_grad()
def weight_sample(tensors: Sequence[Tensor]) -> Tensor:
    """Return up to 4096 evenly spread elements of every tensor, concatenated, float32 on the host."""
    parts = [spread(tensor) for tensor in tensors]
    return torch.cat(parts).float().cpu() if parts else torch.empty(0)


def spread(tensor: Tensor, count: int = SAMPLED_ELEMENTS) -> Tensor:
    """Return at most ``count`` evenly spread elements of a tensor, [elements]."""
    size = tensor.numel()
    stride = -(-size // count) or 1
    if tensor.is_contiguous():
        return tensor.as_strided((-(-size // stride),), (stride,))  # one operation in place of three
    return tensor.reshape(-1)[::stride]
