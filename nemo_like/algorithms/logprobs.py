"""Log-probs of given tokens straight from hidden states, without ever holding all logits.

The output projection, the softmax over a vocabulary that may be spread over ranks, and the pick of
one token per position are one differentiable function that works through the positions in chunks.
Its memory is a chunk of logits, not [positions, vocabulary]; the backward recomputes a chunk's
logits instead of keeping them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

_BYTES_PER_FLOAT = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyShard:
    """This rank's rows of the output projection and the group that holds the others.

    ``first`` is the token id of the first row; rows beyond ``num_valid`` are padding and have no token.
    """

    first: int
    num_valid: int
    group: dist.ProcessGroup | None  # None: the whole vocabulary is here


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobSettings:
    temperature: float  # logits are divided by it, as the generation engine does
    max_chunk_bytes: int = 1 << 28  # float32 logits that exist at once


def linear_logprobs(
    hidden: Tensor, weight: Tensor, token_ids: Tensor, shard: VocabularyShard, settings: LogprobSettings
) -> Tensor:
    """log softmax(hidden @ weight.T / temperature)[token], [M] float32, nats.

    hidden: [M, H]; weight: [rows of this rank, H], same dtype; token_ids: [M] int64, ids of the whole
    vocabulary. The gradient of ``hidden`` is this rank's part: with a vocabulary over several ranks
    the caller sums it over the group.
    """
    return _LinearLogprobs.apply(hidden, weight, token_ids, shard, settings)


class _LinearLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        token_ids: Tensor,
        shard: VocabularyShard,
        settings: LogprobSettings,
    ) -> Tensor:
        rows = weight[: shard.num_valid]
        local_ids = token_ids - shard.first
        is_local = (local_ids >= 0) & (local_ids < shard.num_valid)
        local_ids = local_ids.clamp(0, max(shard.num_valid - 1, 0))
        normaliser = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        picked = torch.empty_like(normaliser)
        for part in _chunks(len(hidden), shard.num_valid, settings.max_chunk_bytes):
            logits = functional.linear(hidden[part], rows).float().div_(settings.temperature)
            torch.logsumexp(logits, dim=-1, out=normaliser[part])
            torch.gather(logits, 1, local_ids[part, None], out=picked[part, None])
        if shard.group is not None:
            normaliser, picked = _combine(normaliser, picked * is_local, shard.group)
        ctx.save_for_backward(hidden, weight, local_ids, is_local, normaliser)
        ctx.shard, ctx.settings = shard, settings
        return picked - normaliser

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, local_ids, is_local, normaliser = ctx.saved_tensors
        rows = weight[: ctx.shard.num_valid]
        grad = grad / ctx.settings.temperature
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for part in _chunks(len(hidden), ctx.shard.num_valid, ctx.settings.max_chunk_bytes):
            logits = functional.linear(hidden[part], rows).float().div_(ctx.settings.temperature)
            # d logp / d logits = onehot - softmax
            slope = logits.sub_(normaliser[part, None]).exp_().mul_(-grad[part, None])
            slope.scatter_add_(1, local_ids[part, None], (grad[part] * is_local[part])[:, None])
            slope = slope.to(weight.dtype)
            grad_hidden[part] = slope @ rows
            grad_weight[: ctx.shard.num_valid] += slope.t() @ hidden[part]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def _chunks(num_positions: int, vocabulary: int, max_bytes: int) -> Iterator[slice]:
    size = max(1, max_bytes // (_BYTES_PER_FLOAT * max(vocabulary, 1)))
    for start in range(0, num_positions, size):
        yield slice(start, min(start + size, num_positions))


def _combine(normaliser: Tensor, picked: Tensor, group: dist.ProcessGroup) -> tuple[Tensor, Tensor]:
    """Whole-vocabulary normaliser and picked logit from each rank's own, in one collective."""
    mine = torch.cat((normaliser, picked))
    everyone = mine.new_empty(group.size() * len(mine))
    dist.all_gather_into_tensor(everyone, mine, group=group)
    normalisers, picks = everyone.view(group.size(), 2, -1).unbind(dim=1)
    return torch.logsumexp(normalisers, dim=0), picks.sum(dim=0)
