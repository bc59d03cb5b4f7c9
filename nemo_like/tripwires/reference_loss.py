"""Computes the loss and its derivatives by log-prob and entropy in float64, from the formulas of
docs/explanation/losses.md.

The derivatives are written out, not taken by autograd, and share no code with ``algorithms``. The tripwires
compare what training back-propagates with them, and they are the golden numbers of the conformance kit.
Below, x is a log-ratio limited to +-20, and r = e^x.

    PPO        -A r while r is on the side of its bound where the gradient flows, else 0
    CISPO      -A clip(r)           REINFORCE   -A
    GSPO       the sum over a sample's tokens of weight times PPO's derivative, divided by the sample's tokens
    GSPO-token PPO's with the sample's r          SAPO   -4 A p (1 - p) r, p = sigmoid(tau (r - 1))
    KL         e - de/dx while |e| < 10, else 0; e is the estimate
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from nemo_like.algorithms.loss_kind import loss_kind_of
from nemo_like.algorithms.options import (
    ClippedLossConfig,
    ImportanceSamplingType,
    KLType,
    LossConfig,
    SurrogateLossConfig,
)
from nemo_like.config.import_path import load_by_path

_LOG_RATIO_LIMIT = 20.0
_KL_LIMIT = 10.0
# A token this close to a bound of the loss, where the derivative jumps, is not compared: float32 and float64
# may see it on different sides. The sign of A is such a bound, and closeness to 0 is relative to A's terms.
_NEAR = 1e-4
# A token's gradient is compared with a scale that has at least this share of |A| + beta, else the rounding of
# a k3 estimate near 0 would count as an error. The scale also has this share of the gradient that the terms
# of A would give if they did not cancel: A is a sum, such as a shift plus a critic's scaled value. Training
# adds it in float32, with an error of up to 2^-23 of its terms, 1.2e-5 of their share in the scale.
_LEAST_SHARE = 1e-2
# Nats by which float32 rounds an entropy and a log-prob, which are differences of logits of up to 2^12.
_ENTROPY_ROUNDING = 2.0**-10


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredTokens:
    """The M tokens that training scored, over all micro-batches and updates of a step. Log-probs in nats.

    Every tensor is [M] float64 unless said otherwise. ``sample`` numbers the samples of all updates: a sample
    that trains in two epochs has two numbers. Columns of a token that does not train may hold anything.
    """

    logprobs: Tensor
    prev: Tensor  # what the ratio compares with; ``logprobs`` itself where the ratio is 1 by definition
    advantages: Tensor
    advantage_sizes: Tensor  # the sum of the magnitudes of the terms that make up an advantage
    trains: Tensor  # bool
    sample: Tensor  # int64, below num_samples
    num_samples: int
    update_tokens: Tensor  # response tokens that train in the token's update, over all ranks
    update_samples: Tensor  # samples that train in the token's update, over all ranks
    generation: Tensor | None = None
    reference: Tensor | None = None
    entropy: Tensor | None = None
    gate: Tensor | None = None  # 0 on tokens without a policy gradient; None where all have one
    likelihood: Tensor | None = None  # the weight of each token's log-prob, besides the policy gradient
    entropy_coefs: Tensor | None = None  # of each token's entropy; None where cfg.entropy_coef is


@dataclass(frozen=True, slots=True)
class ReferenceTerms:
    """The loss and its derivatives per token, as they should be, [M] float64.

    ``loss`` sums to the loss. ``gradient`` and ``entropy_gradient`` are its derivatives; a difference from
    ``gradient`` is judged relative to ``scale``. ``is_certain`` is false next to a bound of the loss.
    """

    loss: Tensor
    gradient: Tensor
    entropy_gradient: Tensor
    scale: Tensor
    is_certain: Tensor


def punished(advantages: Tensor, sizes: Tensor, flags: Tensor, cfg: LossConfig) -> tuple[Tensor, Tensor]:
    """Return advantages and ``advantage_sizes`` with those of tokens of responses of a wrong form replaced.

    ``flags`` [M] float64: 1 for a tool call that cannot be read, 2 for malformed thinking, 3 for both.
    """
    of_flags = [None, cfg.invalid_tool_call_advantage, cfg.malformed_thinking_advantage]
    of_flags.append(of_flags[2] if of_flags[1] is None else of_flags[1])
    for code, penalty in enumerate(of_flags):
        if penalty is not None:
            is_such = flags == code
            advantages = torch.where(is_such, penalty, advantages)
            sizes = torch.where(is_such, -penalty, sizes)
    return advantages, sizes


@torch.no_grad()
def reference_terms(tokens: ScoredTokens, cfg: LossConfig) -> ReferenceTerms:
    """Return the configured loss and its derivatives. A user's own loss has no reference."""
    tokens = _without_untrained(tokens)
    share = token_shares(tokens, cfg)
    value, slope, slope_size, is_certain = _policy_gradient(tokens, share, cfg)
    kl_value, kl_slope = torch.zeros_like(value), torch.zeros_like(value)
    beta = 0.0 if cfg.use_kl_in_reward else cfg.reference_policy_kl_penalty
    if tokens.reference is not None and beta:
        estimate, kl_slope, kl_is_certain = _kl(
            tokens.reference - tokens.logprobs, cfg.reference_policy_kl_type
        )
        if cfg.use_on_policy_kl_approximation and tokens.generation is not None:
            weight, weight_is_certain = _ratio(tokens.logprobs - tokens.generation)
            estimate, kl_slope = estimate * weight, kl_slope * weight
            kl_is_certain = kl_is_certain & weight_is_certain
        kl_value, is_certain = beta * estimate, is_certain & kl_is_certain
    bonus = torch.full_like(value, cfg.entropy_coef or 0.0)
    if tokens.entropy_coefs is not None:
        bonus = tokens.entropy_coefs
    entropy = torch.zeros_like(value) if tokens.entropy is None else tokens.entropy
    likelihood = torch.zeros_like(value) if tokens.likelihood is None else tokens.likelihood
    least = _LEAST_SHARE * (tokens.advantages.abs() + beta + bonus)
    whole_share = 1 / tokens.update_tokens.clamp(min=1)
    return ReferenceTerms(
        loss=share * (value + kl_value - bonus * entropy) - likelihood * tokens.logprobs,
        gradient=slope + share * beta * kl_slope - likelihood,
        entropy_gradient=-bonus * share,
        scale=slope.abs()
        + _LEAST_SHARE * slope_size
        + share * beta * kl_slope.abs()
        + likelihood
        + torch.maximum(share, whole_share) * least,
        is_certain=is_certain,
    )


def entropy_is_possible(entropy: Tensor, logprobs: Tensor, vocabulary: int) -> Tensor:
    """Return for each token whether its entropy can be that of the distribution of its log-prob.

    With p = e^logprob and the rest spread over one or over all other tokens of the ``vocabulary``, it is
    between h and h + (1 - p) log(vocabulary - 1), where h = -p log p - (1 - p) log(1 - p).
    """
    p = logprobs.exp().clamp(max=1.0)
    rest = 1 - p
    least = -torch.xlogy(p, p) - torch.xlogy(rest, rest)
    most = least + rest * math.log(max(vocabulary - 1, 1))
    return (entropy >= least - _ENTROPY_ROUNDING) & (entropy <= most + _ENTROPY_ROUNDING)


def token_shares(tokens: ScoredTokens, cfg: LossConfig) -> Tensor:
    """Return each token's weight in the mean over its update's global batch; 0 where the token does not
    train."""
    if cfg.token_level_loss:
        divisor = tokens.update_tokens
    elif cfg.sequence_length_normalizer is not None:
        divisor = cfg.sequence_length_normalizer * tokens.update_samples
    else:
        divisor = _sample_sizes(tokens)[tokens.sample] * tokens.update_samples
    return torch.where(tokens.trains, 1 / divisor.clamp(min=1), 0.0)


def kl_estimates(log_ratio: Tensor, kind: KLType) -> Tensor:
    """Return the estimate of the KL to the reference at each token, [M]; ``log_ratio`` is reference minus
    policy."""
    return _kl(log_ratio, kind)[0]


def kl_to_go(log_ratio: Tensor, run: Tensor, num_runs: int, kind: KLType) -> Tensor:
    """Return for each of the M tokens the KL to the reference, summed over this and the later tokens of its
    token run, which without branches is its sample.

    ``log_ratio`` [M] float64 is reference minus policy, nats. The tokens of a run are consecutive; the runs
    may be in any order.
    """
    estimate, _, _ = _kl(log_ratio, kind)
    totals = torch.zeros(num_runs, dtype=estimate.dtype, device=estimate.device)
    totals.index_add_(0, run, estimate)
    running = estimate.cumsum(0)
    is_first = torch.ones_like(run, dtype=torch.bool)
    is_first[1:] = run[1:] != run[:-1]
    before = torch.zeros_like(totals)
    before[run[is_first]] = (running - estimate)[is_first]
    return totals[run] - (running - estimate - before[run])


def _without_untrained(tokens: ScoredTokens) -> ScoredTokens:
    """Replace the values of tokens that do not train by harmless values."""

    def harmless(values: Tensor | None) -> Tensor | None:
        return None if values is None else torch.where(tokens.trains, values, tokens.logprobs)

    return ScoredTokens(
        logprobs=tokens.logprobs,
        prev=torch.where(tokens.trains, tokens.prev, tokens.logprobs),
        advantages=tokens.advantages,
        advantage_sizes=tokens.advantage_sizes,
        trains=tokens.trains,
        sample=tokens.sample,
        num_samples=tokens.num_samples,
        update_tokens=tokens.update_tokens,
        update_samples=tokens.update_samples,
        generation=harmless(tokens.generation),
        reference=harmless(tokens.reference),
        entropy=tokens.entropy,
        gate=tokens.gate,
        entropy_coefs=tokens.entropy_coefs,
        likelihood=None if tokens.likelihood is None else torch.where(tokens.trains, tokens.likelihood, 0.0),
    )


def _policy_gradient(
    tokens: ScoredTokens, share: Tensor, cfg: LossConfig
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return four tensors with one entry per token.

    They are the value; the derivative of the loss, with the token's share; the size of this derivative if the
    terms of the advantage did not cancel; and whether the derivative is certain.
    """
    advantages, log_ratio, kind = tokens.advantages, tokens.logprobs - tokens.prev, loss_kind_of(cfg)
    assert kind.reference is not None, "the caller asks only for kinds that have a reference"
    if kind.has_sample_ratio:
        log_ratio = _sample_mean(log_ratio, tokens)
    surrogate: Surrogate = load_by_path(kind.reference)
    value, factor, is_certain = surrogate(tokens, log_ratio, cfg)
    is_certain &= advantages.abs() >= _NEAR * tokens.advantage_sizes
    if cfg.use_importance_sampling_correction and tokens.generation is not None:
        weights, weights_are_certain = _engine_weights(tokens, cfg)
        value, factor, is_certain = value * weights, factor * weights, is_certain & weights_are_certain
    if cfg.off_policy_mask_threshold is not None and tokens.generation is not None:
        difference = (tokens.generation - tokens.logprobs).clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
        far = _sample_mean(difference, tokens) - cfg.off_policy_mask_threshold
        is_left_out = (far > 0) & (advantages < 0)
        value, factor = torch.where(is_left_out, 0.0, value), torch.where(is_left_out, 0.0, factor)
        is_certain = is_certain & (far.abs() > _NEAR)
    if tokens.gate is not None:
        value, factor = value * tokens.gate, factor * tokens.gate
    factor = factor * share
    slope, slope_size = factor * advantages, factor.abs() * tokens.advantage_sizes
    if kind.spreads_gradient:
        slope, slope_size = _sample_mean(slope, tokens), _sample_mean(slope_size, tokens)
    return value, slope, slope_size, is_certain


# A surrogate takes tokens, their log-ratios [M] and the config group ``loss_fn``. It returns per token the
# value; the derivative divided by the advantage, which depends on the advantage's sign alone; and whether the
# derivative is certain.
Surrogate = Callable[[ScoredTokens, Tensor, Any], tuple[Tensor, Tensor, Tensor]]


def clipped_surrogate(
    tokens: ScoredTokens, log_ratio: Tensor, cfg: SurrogateLossConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Return PPO's surrogate, with the dual clip."""
    ratio, is_certain = _ratio(log_ratio)
    low, high, advantages = 1 - cfg.ratio_clip_min, 1 + cfg.ratio_clip_max, tokens.advantages
    worst = high if cfg.ratio_clip_c is None else cfg.ratio_clip_c
    is_held = torch.where(advantages > 0, ratio > high, ratio < low)
    value = -advantages * torch.where(advantages > 0, ratio.clamp(max=high), ratio.clamp(min=low))
    if cfg.ratio_clip_c is not None:
        is_held |= (advantages < 0) & (ratio > worst)
        value = torch.where(advantages < 0, torch.minimum(value, -advantages * worst), value)
    is_held |= log_ratio.abs() > _LOG_RATIO_LIMIT
    for bound in (low, high, worst):
        is_certain &= (ratio - bound).abs() > _NEAR
    return value, torch.where(is_held, 0.0, -ratio), is_certain


def weighted_logprob(
    tokens: ScoredTokens, log_ratio: Tensor, cfg: ClippedLossConfig
) -> tuple[Tensor, Tensor, Tensor]:
    """Return CISPO's surrogate: the clipped ratio weighs the log-prob."""
    ratio, is_certain = _ratio(log_ratio)
    factor = -ratio.clamp(1 - cfg.ratio_clip_min, 1 + cfg.ratio_clip_max)
    return tokens.advantages * factor * tokens.logprobs, factor, is_certain


def plain_logprob(tokens: ScoredTokens, log_ratio: Tensor, cfg: LossConfig) -> tuple[Tensor, Tensor, Tensor]:
    """Return REINFORCE's surrogate, the advantage times the log-prob, which does not depend on
    ``log_ratio``; the three tensors are those of every surrogate here."""
    factor = -torch.ones_like(log_ratio)
    return -tokens.advantages * tokens.logprobs, factor, torch.ones_like(log_ratio, dtype=torch.bool)


def soft_gate(tokens: ScoredTokens, log_ratio: Tensor, cfg: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return SAPO's surrogate, with its keys ``tau_pos`` and ``tau_neg``; the gate's derivative by r is 4 p
    (1 - p)."""
    ratio, is_certain = _ratio(log_ratio)
    advantages = tokens.advantages
    tau = torch.full_like(ratio, cfg.tau_neg).masked_fill(advantages > 0, cfg.tau_pos)
    is_open = 1 / (1 + (-tau * (ratio - 1)).exp())
    factor = torch.where(log_ratio.abs() > _LOG_RATIO_LIMIT, 0.0, -4 * is_open * (1 - is_open) * ratio)
    return -advantages * 4 * is_open / tau, factor, is_certain


def _ratio(log_ratio: Tensor) -> tuple[Tensor, Tensor]:
    """Return the limited ratio, and whether the log-ratio is clear of the limit."""
    is_certain = (log_ratio.abs() - _LOG_RATIO_LIMIT).abs() > _NEAR
    return log_ratio.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT).exp(), is_certain


def _engine_weights(tokens: ScoredTokens, cfg: LossConfig) -> tuple[Tensor, Tensor]:
    """Return w = p_prev / p_engine per token or per sample, bounded, and whether it is clear of the
    bounds."""
    limit = _LOG_RATIO_LIMIT
    low = cfg.truncated_importance_sampling_ratio_min or 0.0
    high = cfg.truncated_importance_sampling_ratio or torch.inf
    kind = cfg.truncated_importance_sampling_type
    difference = (tokens.prev - tokens.generation).clamp(-limit, limit)
    judged = difference
    if loss_kind_of(cfg).has_sample_ratio:
        difference = _sample_mean(difference, tokens) * _sample_sizes(tokens)[tokens.sample]
        judged = difference = difference.clamp(-limit, limit)
    elif kind is ImportanceSamplingType.seq_mask:
        judged = _sample_mean(difference, tokens)
    weights, judged = difference.exp(), judged.exp()
    is_certain = ((judged - low).abs() > _NEAR) & ((judged - high).abs() > _NEAR)
    if kind is ImportanceSamplingType.tis:
        return weights.clamp(low, high), torch.ones_like(is_certain)
    return torch.where((judged < low) | (judged > high), 0.0, weights), is_certain


def _kl(difference: Tensor, kind: KLType) -> tuple[Tensor, Tensor, Tensor]:
    """Return estimates of the KL, their derivatives by the log-prob, and whether each derivative is certain.

    ``difference`` is reference minus policy, [M].
    """
    x = difference.clamp(-_LOG_RATIO_LIMIT, _LOG_RATIO_LIMIT)
    if kind is KLType.k1:
        estimate, by_x = -x, -torch.ones_like(x)
    elif kind is KLType.k2:
        estimate, by_x = x * x / 2, x
    else:
        estimate, by_x = torch.expm1(x) - x, torch.expm1(x)
    by_x = torch.where(difference.abs() > _LOG_RATIO_LIMIT, 0.0, by_x)
    slope = torch.where(estimate.abs() > _KL_LIMIT, 0.0, estimate - by_x)
    is_certain = ((estimate.abs() - _KL_LIMIT).abs() > _NEAR) & (
        (difference.abs() - _LOG_RATIO_LIMIT).abs() > _NEAR
    )
    return estimate.clamp(-_KL_LIMIT, _KL_LIMIT), slope, is_certain


def _sample_sizes(tokens: ScoredTokens) -> Tensor:
    return torch.bincount(tokens.sample, minlength=tokens.num_samples).clamp(min=1)


def _sample_mean(values: Tensor, tokens: ScoredTokens) -> Tensor:
    """Return for each token the mean of ``values`` over the tokens of its sample."""
    sums = torch.zeros(tokens.num_samples, dtype=values.dtype, device=values.device)
    return (sums.index_add_(0, tokens.sample, values) / _sample_sizes(tokens))[tokens.sample]
