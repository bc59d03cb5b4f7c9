"""Log-probs and entropies of given tokens straight from hidden states, without ever holding all logits.

One differentiable function does the output projection, the softmax over a vocabulary that may be spread
over ranks, the pick of one token per position, and the entropy. It works through the positions in chunks,
so that its memory is the logits of one chunk, not [positions, vocabulary]; the backward pass recomputes
the logits of a chunk instead of keeping them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from nemo_like.algorithms.logit_chunks import LOGIT_CHUNK_BYTES
from nemo_like.policy.options import Device

_BYTES_PER_FLOAT = 4
# The logit of a token that cannot be sampled. It is finite, since a probability of 0 times minus infinity
# would make the entropy NaN.
_IMPOSSIBLE = -1e30


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenScores:
    """A model's log-probs of the M scored tokens of a micro-batch, in the micro-batch's order, and more.

    ``logprobs`` and ``entropy`` are [M] float32, nats, and carry a gradient in training. ``entropy`` belongs
    to the distribution that each token was drawn from. ``topk_logprobs`` [M, k], with a gradient too, are the
    log-probs of k tokens that the caller gave for each scored token; or of the k most likely tokens, whose
    ids are then in ``topk_ids`` [M, k]. A field that was not asked for is None. A backend that spreads a
    sequence over ranks gathers it first, so that a loss over whole samples needs no communication.
    """

    logprobs: Tensor
    entropy: Tensor | None = None
    topk_logprobs: Tensor | None = None
    topk_ids: Tensor | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors that are not None, in the order of the fields."""
        fields = (self.logprobs, self.entropy, self.topk_logprobs, self.topk_ids)
        return tuple(one for one in fields if one is not None)

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> TokenScores:
        """Return the scores that have these ``tensors``; the inverse of the property."""
        logprobs, *others = tensors
        return cls(
            logprobs=logprobs,
            entropy=next((one for one in others if one.ndim == 1), None),
            topk_logprobs=next((one for one in others if one.ndim == 2 and one.is_floating_point()), None),
            topk_ids=next((one for one in others if not one.is_floating_point()), None),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class VocabularyShard:
    """The rows of the output projection that this rank has, and the group of ranks that have all rows.

    ``first`` is the token id of the first row; rows beyond ``num_valid`` are padding and have no token.
    """

    first: int
    num_valid: int
    group: dist.ProcessGroup | None  # None: the whole vocabulary is here


@dataclass(frozen=True, slots=True, kw_only=True)
class LogprobSettings:
    temperature: float  # the logits are divided by it, as in the generation engine
    with_entropy: bool = False  # costs another pass over every chunk of logits
    # Size of a chunk of float32 logits, twice of which exist with entropy; None: by device.
    max_chunk_bytes: int | None = None
    forbidden_ids: tuple[int, ...] = ()  # tokens that the generation engine gives a probability of 0
    top_k: int = 0  # how many most likely tokens at each position get log-probs as well


def linear_scores(
    hidden: Tensor,
    weight: Tensor,
    token_ids: Tensor,
    shard: VocabularyShard,
    settings: LogprobSettings,
    topk_ids: Tensor | None = None,
) -> TokenScores:
    """Compute log p[token] and the entropy -sum(p log p) under p = softmax(hidden @ weight.T / temperature).

    hidden: [M, H]; weight: [rows of this rank, H], same dtype; token_ids: [M] int64, ids of the whole
    vocabulary. With ``topk_ids`` [M, k] int64 the log-probs of these tokens are computed too; ids may repeat.
    All results are float32, or float64 where ``hidden`` is. The gradient of ``hidden`` is only this rank's
    part: with a vocabulary over several ranks the caller sums it over the group.
    """
    ids = token_ids[:, None] if topk_ids is None else torch.cat((token_ids[:, None], topk_ids), dim=1)
    logprobs, entropy = _LinearScores.apply(hidden, weight, ids, shard, settings)
    return TokenScores(
        logprobs=logprobs[:, 0],
        entropy=entropy,
        topk_logprobs=None if topk_ids is None else logprobs[:, 1:],
    )


def scores_with_most_likely(
    hidden: Tensor, weight: Tensor, token_ids: Tensor, shard: VocabularyShard, settings: LogprobSettings
) -> TokenScores:
    """Compute ``linear_scores``, and where ``settings.top_k`` is above 0 the ids and log-probs of the most
    likely tokens. Raises ValueError as ``most_likely_ids`` does."""
    if not settings.top_k:
        return linear_scores(hidden, weight, token_ids, shard, settings)
    ids = most_likely_ids(hidden, weight, settings.top_k, shard, settings)
    return replace(linear_scores(hidden, weight, token_ids, shard, settings, ids), topk_ids=ids)


@torch.no_grad()
def most_likely_ids(
    hidden: Tensor, weight: Tensor, k: int, shard: VocabularyShard, settings: LogprobSettings
) -> Tensor:
    """Return the ids of the k most likely tokens at each position, [M, k] int64, most likely first.

    Arguments are as in ``linear_scores``. Of equally likely tokens the lower id comes first, whether the
    vocabulary is on one rank or spread over several. Raises ValueError when the vocabulary has fewer than k
    tokens, and when a logit is NaN.
    """
    rows = weight[: shard.num_valid]
    num_here = min(k, shard.num_valid)
    logits = hidden.new_full((len(hidden), k), -torch.inf, dtype=_score_dtype(hidden))
    ids = torch.zeros(len(hidden), k, dtype=torch.int64, device=hidden.device)
    for part in _chunks(len(hidden), shard.num_valid, _chunk_bytes(hidden, settings)):
        all_logits = _logits(hidden[part], rows, shard, settings)
        local_ids = _columns_of_largest(all_logits, num_here)
        logits[part, :num_here] = all_logits.gather(1, local_ids)
        ids[part, :num_here] = local_ids + shard.first
    if shard.group is not None:
        # Ranks follow each other in the order of their ids, so a stable sort keeps lower ids in front.
        logits, ids = (_of_all_ranks(mine, shard.group) for mine in (logits, ids))
    logits, order = logits.sort(dim=1, descending=True, stable=True)
    if k > logits.shape[1] or bool(logits[:, k - 1].isneginf().any()):
        raise ValueError(f"the vocabulary has fewer than {k} tokens, so there are no {k} most likely ones")
    return ids.gather(1, order)[:, :k]


class _LinearScores(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        ids: Tensor,
        shard: VocabularyShard,
        settings: LogprobSettings,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute the log-probs of ``ids`` [M, K] at each position, and the entropy."""
        rows = weight[: shard.num_valid]
        local_ids = ids - shard.first
        is_local = (local_ids >= 0) & (local_ids < shard.num_valid)
        local_ids = local_ids.clamp(0, max(shard.num_valid - 1, 0))
        normaliser = hidden.new_empty(len(hidden), dtype=_score_dtype(hidden))
        picked = normaliser.new_empty(ids.shape)
        entropy = torch.empty_like(normaliser) if settings.with_entropy else None
        for part in _chunks(len(hidden), shard.num_valid, _chunk_bytes(hidden, settings)):
            logits = _logits(hidden[part], rows, shard, settings)
            torch.logsumexp(logits, dim=-1, out=normaliser[part])
            torch.gather(logits, 1, local_ids[part], out=picked[part])
            if entropy is not None:
                logprobs = logits.sub_(normaliser[part, None])
                entropy[part] = -torch.linalg.vecdot(logprobs.exp(), logprobs)
        if shard.group is not None:
            normaliser, picked, entropy = _combine(normaliser, picked * is_local, entropy, shard.group)
        ctx.save_for_backward(hidden, weight, local_ids, is_local, normaliser, entropy)
        ctx.shard, ctx.settings = shard, settings
        ctx.set_materialize_grads(False)
        return picked - normaliser[:, None], entropy

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, local_ids, is_local, normaliser, entropy = ctx.saved_tensors
        rows = weight[: ctx.shard.num_valid]
        grad = normaliser.new_zeros(local_ids.shape) if grad is None else grad / ctx.settings.temperature
        if grad_entropy is not None:
            grad_entropy = grad_entropy / ctx.settings.temperature
        # Each picked log-prob takes its share of the normaliser's gradient, on this rank or on another.
        of_normaliser, grad = grad.sum(dim=1), grad * is_local
        grad_hidden = torch.zeros_like(hidden)
        grad_weight = torch.zeros(weight.shape, dtype=normaliser.dtype, device=weight.device)
        for part in _chunks(len(hidden), ctx.shard.num_valid, _chunk_bytes(hidden, ctx.settings)):
            logits = _logits(hidden[part], rows, ctx.shard, ctx.settings)
            logprobs = logits.sub_(normaliser[part, None])
            # d logp / d logits = onehot - p
            if grad_entropy is None:
                slope = logprobs.exp_().mul_(-of_normaliser[part, None])
            else:
                # d entropy / d logits = -p (log p + entropy)
                probs = logprobs.exp()
                slope = logprobs.add_(entropy[part, None]).mul_(-grad_entropy[part, None])
                slope.sub_(of_normaliser[part, None]).mul_(probs)
            slope.scatter_add_(1, local_ids[part], grad[part])
            slope = slope.to(weight.dtype)
            grad_hidden[part] = slope @ rows
            grad_weight[: ctx.shard.num_valid] += slope.t() @ hidden[part]
        return grad_hidden, grad_weight.to(weight.dtype), None, None, None


def _score_dtype(hidden: Tensor) -> torch.dtype:
    return torch.promote_types(hidden.dtype, torch.float32)


def _logits(hidden: Tensor, rows: Tensor, shard: VocabularyShard, settings: LogprobSettings) -> Tensor:
    """Return this rank's logits of some positions, [positions, rows], divided by the temperature."""
    logits = functional.linear(hidden, rows).to(_score_dtype(hidden)).div_(settings.temperature)
    columns = (token - shard.first for token in settings.forbidden_ids)
    if forbidden := [column for column in columns if 0 <= column < shard.num_valid]:
        logits.index_fill_(1, torch.tensor(forbidden, device=logits.device), _IMPOSSIBLE)
    return logits


def _chunk_bytes(hidden: Tensor, settings: LogprobSettings) -> int:
    return settings.max_chunk_bytes or LOGIT_CHUNK_BYTES[Device[hidden.device.type]]


def _chunks(num_positions: int, vocabulary: int, max_bytes: int) -> Iterator[slice]:
    size = max(1, max_bytes // (_BYTES_PER_FLOAT * max(vocabulary, 1)))
    for start in range(0, num_positions, size):
        yield slice(start, min(start + size, num_positions))


def _columns_of_largest(values: Tensor, k: int) -> Tensor:
    """Return the columns of each row's k largest values, [rows, k] int64, largest first. Among equal values
    the first column wins; torch's ``topk`` leaves that open."""
    smallest = values.topk(k, dim=1).values[:, -1:] if k else values[:, :0]
    is_larger, is_equal = values > smallest, values == smallest
    num_free = k - is_larger.sum(dim=1, keepdim=True)
    is_chosen = is_larger | (is_equal & (is_equal.cumsum(dim=1, dtype=torch.int32) <= num_free))
    columns = is_chosen.nonzero()[:, 1]
    if len(columns) != len(values) * k:
        raise ValueError("a logit is not a number, so no tokens are the most likely; is the model sound?")
    columns = columns.view(len(values), k)
    order = values.gather(1, columns).argsort(dim=1, descending=True, stable=True)
    return columns.gather(1, order)


def _of_all_ranks(mine: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather every rank's [M, k] and put them side by side, [M, ranks * k]."""
    everyone = mine.new_empty(group.size() * mine.numel())
    dist.all_gather_into_tensor(everyone, mine.flatten(), group=group)
    return everyone.view(group.size(), *mine.shape).movedim(0, 1).flatten(1)


def _combine(
    normaliser: Tensor, picked: Tensor, entropy: Tensor | None, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Combine the ranks' normalisers [M], picked logits [M, K] and entropies [M] into those of the whole
    vocabulary, in one collective."""
    parts = [normaliser[:, None], picked] + ([] if entropy is None else [entropy[:, None]])
    mine = torch.cat(parts, dim=1)
    everyone = _of_all_ranks(mine, group).unflatten(1, (group.size(), -1))
    normalisers, picks = everyone[:, :, 0], everyone[:, :, 1 : 1 + picked.shape[1]]
    whole = torch.logsumexp(normalisers, dim=1)
    if entropy is not None:
        # A rank's entropy covers only its rows of the vocabulary; log_share is the log-probability of these
        # rows.
        log_share = normalisers - whole[:, None]
        entropy = (log_share.exp() * (everyone[:, :, -1] - log_share)).sum(dim=1)
    return whole, picks.sum(dim=1), entropy


# Nats, as in verl. exp(x) overflows float32 beyond x = 88, and infinity times an advantage of 0 is NaN.
LIMIT = 20.0


def limited(log_ratio: Tensor) -> Tensor:
    """Return ``log_ratio``, of any shape, limited to +-20; no gradient flows where the limit applies."""
    return log_ratio.clamp(-LIMIT, LIMIT)
