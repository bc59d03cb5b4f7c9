"""The loss of on-policy distillation: the student samples, and a teacher scores each token.

    divergence        over                   reads                                     its gradient comes by
    reverse           the sampled tokens     teacher_logprobs                          an advantage per token
    reverse_topk      k tokens and the tail  teacher_topk_ids, teacher_topk_logprobs   the student's
    forward           k tokens and the tail  the same columns                          log-probs of
    jensen_shannon    k tokens and the tail  the same columns                          the k tokens

``algorithms.distillation`` has the formulas of the divergences.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import Tensor

from nemo_like.algorithms.distillation import forward_kl, jensen_shannon, reverse_kl, sampled_reverse_kl
from nemo_like.algorithms.loss_traits import policy_gradient_of
from nemo_like.algorithms.losses import LossTerms, LossTokens, TokenMean, logs
from nemo_like.algorithms.options import LossConfig
from nemo_like.batch.columns import (
    TEACHER_LOGPROBS,
    TEACHER_TOPK_LOGPROBS,
    Column,
    reads_by_arguments,
    teacher_topk_columns,
)
from nemo_like.config.import_path import load_by_path

_MEAN = "teacher_divergence"


def distillation_reads(divergence: str, top_k: int, **_: object) -> tuple[Column, ...]:
    """Return the columns that the loss reads with these arguments."""
    return (TEACHER_LOGPROBS,) if divergence == "reverse" else teacher_topk_columns(top_k)


@logs(_MEAN)
@reads_by_arguments(distillation_reads)
def distillation(
    tokens: LossTokens,
    cfg: LossConfig,
    *,
    divergence: str,
    weight: float,
    reward_weight: float,
    beta: float,
    top_k: int,
    **_: object,
) -> LossTerms:
    """Compute ``weight`` x divergence from the teacher + ``reward_weight`` x the loss ``policy_loss``.

    With ``divergence`` reverse both terms are one policy gradient; a token's advantage is ``reward_weight``
    times the sample's advantage plus ``weight`` times the token's teacher_logprobs - prev_logprobs. Otherwise
    the divergence over the teacher's ``top_k`` tokens and the tail is added to the loss, with the same shares
    of the mean; it is not corrected for samples of older weights. ``beta`` belongs to jensen_shannon. The
    mean teacher_divergence is the divergence itself. Raises ValueError for another ``divergence``.
    """
    policy = policy_gradient_of(cfg)
    policy_loss = partial(load_by_path(policy.function), cfg=cfg, **policy.own_keys(cfg))
    weighted = replace(tokens, advantages=reward_weight * tokens.advantages)
    if divergence == "reverse":
        apart = sampled_reverse_kl(tokens.columns[TEACHER_LOGPROBS.name], tokens.prev_logprobs)
        terms = policy_loss(replace(weighted, advantages=weighted.advantages - weight * apart))
    else:
        apart = _over_topk(divergence, beta)(
            tokens.columns[TEACHER_TOPK_LOGPROBS], _of_teachers_topk(tokens, top_k)
        )
        terms = policy_loss(weighted)
        terms = replace(terms, loss=terms.loss + weight * (tokens.weights * apart).sum())
    return replace(terms, means={**terms.means, _MEAN: TokenMean(apart.detach(), tokens.mask)})


def _over_topk(divergence: str, beta: float) -> Callable[[Tensor, Tensor], Tensor]:
    known: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "reverse_topk": reverse_kl,
        "forward": forward_kl,
        "jensen_shannon": partial(jensen_shannon, beta=beta),
    }
    if divergence not in known:
        raise ValueError(f"divergence={divergence} must be one of reverse, {', '.join(known)}")
    return known[divergence]


def _of_teachers_topk(tokens: LossTokens, top_k: int) -> Tensor:
    """Return the student's log-probs of the teacher's most likely tokens, [M, k], with a gradient."""
    if tokens.topk_logprobs is None:
        raise ValueError(f"the backend gave no log-probs of the teacher's {top_k} most likely tokens")
    return tokens.topk_logprobs
