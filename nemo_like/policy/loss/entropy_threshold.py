"""The entropy from which on a step's tokens have a policy gradient (arXiv 2506.01939).

    entropies [M] of each rank ──▶ counts of equal leading bits, summed over ranks ──▶ one threshold

Ranks sum numbers of tokens, never tokens, so the result is exact and the same on every rank, however samples
are cut over them; it does not matter that the ranks of a replica count the same tokens.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist
from torch import Tensor

# A float32 that is not negative has 31 bits, and is ordered as the integer of these bits is.
_BITS, _DIGIT = 31, 11


def entropy_threshold(entropies: Tensor, share: float, group: dist.ProcessGroup | None) -> float:
    """Return the greatest entropy that at least ``share`` of all ranks' tokens reach, nats.

    ``entropies`` [M] float32 are those of this rank's tokens that train; the ranks of ``group`` call this
    together. Return 0 where no rank has any.
    """
    keys = entropies.float().clamp(min=0).view(torch.int32).long()
    total = int(_summed(torch.tensor([len(keys)], device=keys.device), group))
    if not total:
        return 0.0
    wanted, found, shift = max(1, math.ceil(round(share * total, 6))), 0, _BITS
    while shift:
        width = min(_DIGIT, shift)
        shift -= width
        counts = _summed(torch.bincount((keys >> shift) & (2**width - 1), minlength=2**width), group)
        at_least = counts.flip(0).cumsum(0).flip(0)
        digit = int((at_least >= wanted).sum()) - 1
        wanted -= int(at_least[digit] - counts[digit])
        keys = keys[((keys >> shift) & (2**width - 1)) == digit]
        found = found << width | digit
    return torch.tensor(found, dtype=torch.int32).view(torch.float32).item()


def _summed(counts: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Return the sum of ``counts`` over the ranks of ``group``; None is a group of one."""
    if group is not None:
        dist.all_reduce(counts, group=group)
    return counts
