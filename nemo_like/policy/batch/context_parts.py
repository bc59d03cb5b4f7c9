"""Which tokens of a row each context-parallel rank computes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ContextRank:
    """A worker's rank among the context-parallel ranks, which divide the tokens of every sample."""

    rank: int
    size: int


WHOLE_CONTEXT = ContextRank(0, 1)


def context_positions(length: int, rank: int, num_ranks: int) -> Tensor:
    """Return the positions that one context-parallel rank computes, [length / num_ranks] int64.

    A sample of ``length`` tokens is cut into 2 x ``num_ranks`` equal pieces. Each rank gets piece ``rank``
    from the front and piece ``rank`` from the back, so that causal attention costs every rank the same.
    """
    if num_ranks == 1:
        return torch.arange(length)
    pieces = torch.arange(length).view(2 * num_ranks, -1)
    return torch.cat((pieces[rank], pieces[2 * num_ranks - 1 - rank]))
