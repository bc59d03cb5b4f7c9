"""Log-probs and entropies of given tokens straight from hidden states, without ever holding all logits.

One differentiable function does the output projection, the softmax over a vocabulary that may be spread
over ranks, the pick of one token per position, and the entropy. It works through the positions in pieces,
so that its memory is the logits of one piece, not [positions, vocabulary]; the backward pass recomputes
the logits of a piece instead of keeping them.
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
# The logit of a token that cannot be sampled. It is finite, since a probability of 0 times minus infinity
# would make the entropy NaN.
_IMPOSSIBLE = -1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """What a model says of the M scored tokens of a micro-batch, in the micro-batch's order.

    Both tensors are [M] float32, nats, and carry a gradient in training. ``entropy`` is that of the
    distribution each token was drawn from; None where it was not asked for. A backend that spreads a sequence
    over ranks gathers the parts first, so that a loss over whole samples needs no communication.
    """

    logprobs: Tensor
    entropy: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyShard:
    """Which rows of the output projection this rank has, and the ranks that have the others.

    ``first`` is the token id of the first row; rows beyond ``num_valid`` are padding and have no token.
    """

    first: int
    num_valid: int
    group: dist.ProcessGroup | None  # None: the whole vocabulary is here


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobSettings:
    temperature: float  # logits are divided by it, as the generation engine does
    with_entropy: bool = False  # costs another pass over every chunk of logits
    max_chunk_bytes: int = 1 << 28  # of float32 logits that exist at once; twice that with entropy
    forbidden_ids: tuple[int, ...] = ()  # tokens that the generation engine gives a probability of 0


def linear_scores(
    hidden: Tensor, weight: Tensor, token_ids: Tensor, shard: VocabularyShard, settings: LogprobSettings
) -> TokenScores:
    """Compute log p[token] and the entropy -sum(p log p) under p = softmax(hidden @ weight.T / temperature).

    hidden: [M, H]; weight: [rows of this rank, H], same dtype; token_ids: [M] int64, ids of the whole
    vocabulary. The gradient of ``hidden`` is only this rank's part: with a vocabulary over several ranks
    the caller sums it over the group.
    """
    logprobs, entropy = _LinearScores.apply(hidden, weight, token_ids, shard, settings)
    return TokenScores(logprobs=logprobs, entropy=entropy)


class _LinearScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        token_ids: Tensor,
        shard: VocabularyShard,
        settings: LogprobSettings,
    ) -> tuple[Tensor, Tensor | None]:
        rows = weight[: shard.num_valid]
        local_ids = token_ids - shard.first
        is_local = (local_ids >= 0) & (local_ids < shard.num_valid)
        local_ids = local_ids.clamp(0, max(shard.num_valid - 1, 0))
        normaliser = torch.empty(len(hidden), dtype=torch.float32, device=hidden.device)
        picked = torch.empty_like(normaliser)
        entropy = torch.empty_like(normaliser) if settings.with_entropy else None
        for part in _chunks(len(hidden), shard.num_valid, settings.max_chunk_bytes):
            logits = _logits(hidden[part], rows, shard, settings)
            torch.logsumexp(logits, dim=-1, out=normaliser[part])
            torch.gather(logits, 1, local_ids[part, None], out=picked[part, None])
            if entropy is not None:
                logprobs = logits.sub_(normaliser[part, None])
                entropy[part] = -torch.linalg.vecdot(logprobs.exp(), logprobs)
        if shard.group is not None:
            normaliser, picked, entropy = _combine(normaliser, picked * is_local, entropy, shard.group)
        ctx.save_for_backward(hidden, weight, local_ids, is_local, normaliser, entropy)
        ctx.shard, ctx.settings = shard, settings
        ctx.set_materialize_grads(False)
        return picked - normaliser, entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, local_ids, is_local, normaliser, entropy = ctx.saved_tensors
        rows = weight[: ctx.shard.num_valid]
        grad = torch.zeros_like(normaliser) if grad is None else grad / ctx.settings.temperature
        if grad_entropy is not None:
            grad_entropy = grad_entropy / ctx.settings.temperature
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=torch.float32, device=weight.device)
        for part in _chunks(len(hidden), ctx.shard.num_valid, ctx.settings.max_chunk_bytes):
            logits = _logits(hidden[part], rows, ctx.shard, ctx.settings)
            logprobs = logits.sub_(normaliser[part, None])
            # d logp / d logits = onehot - p
            if grad_entropy is None:
                slope = logprobs.exp_().mul_(-grad[part, None])
            else:
                # d entropy / d logits = -p (log p + entropy)
                probs = logprobs.exp()
                slope = logprobs.add_(entropy[part, None]).mul_(-grad_entropy[part, None])
                slope.sub_(grad[part, None]).mul_(probs)
            slope.scatter_add_(1, local_ids[part, None], (grad[part] * is_local[part])[:, None])
            slope = slope.to(weight.dtype)
            grad_hidden[part] = slope @ rows
            grad_weight[: ctx.shard.num_valid] += slope.t() @ hidden[part]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def _logits(hidden: Tensor, rows: Tensor, shard: VocabularyShard, settings: LogprobSettings) -> Tensor:
    """Return this rank's logits of some positions, [positions, rows] float32, divided by the temperature."""
    logits = functional.linear(hidden, rows).float().div_(settings.temperature)
    for token in settings.forbidden_ids:
        if 0 <= token - shard.first < shard.num_valid:
            logits[:, token - shard.first] = _IMPOSSIBLE
    return logits


def _chunks(num_positions: int, vocabulary: int, max_bytes: int) -> Iterator[slice]:
    size = max(1, max_bytes // (_BYTES_PER_FLOAT * max(vocabulary, 1)))
    for start in range(0, num_positions, size):
        yield slice(start, min(start + size, num_positions))


def _combine(
    normaliser: Tensor, picked: Tensor, entropy: Tensor | None, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Compute normaliser, picked logits and entropy over the whole vocabulary from each rank's own, in one
    collective."""
    mine = torch.stack((normaliser, picked) if entropy is None else (normaliser, picked, entropy))
    everyone = mine.new_empty(group.size() * mine.numel())
    dist.all_gather_into_tensor(everyone, mine.flatten(), group=group)
    normalisers, picks, *entropies = everyone.view(group.size(), *mine.shape).unbind(dim=1)
    whole = torch.logsumexp(normalisers, dim=0)
    if entropies:
        # Each rank's entropy is that of its part of the vocabulary alone; log_share is that part's
        # log-probability.
        log_share = normalisers - whole
        entropy = (log_share.exp() * (entropies[0] - log_share)).sum(dim=0)
    return whole, picks.sum(dim=0), entropy


# Nats, as in verl. exp(x) overflows float32 beyond x = 88, and infinity times an advantage of 0 is NaN.
LIMIT = 20.0


def limited(log_ratio: Tensor) -> Tensor:
    """Return ``log_ratio``, of any shape, limited to +-20; no gradient flows where the limit applies."""
    return log_ratio.clamp(-LIMIT, LIMIT)
