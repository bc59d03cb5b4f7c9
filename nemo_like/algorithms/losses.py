"""Policy-gradient losses as pure functions over packed tokens.

A micro-batch's scored tokens (the tokens that the policy generated) come as 1-D tensors of M values,
whatever the samples' layout was in the forward pass. Each token carries a *weight*, its share of
the mean over the whole global batch, so a loss is one weighted sum and its gradient does not depend
on how the batch is cut into micro-batches or spread over ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from nemo_like.algorithms.importance_sampling import importance_correction, sample_means
from nemo_like.algorithms.logprobs import limited
from nemo_like.algorithms.loss_traits import has_sample_ratio
from nemo_like.algorithms.off_policy import kl_weights, on_policy_gate
from nemo_like.algorithms.options import KLType, LossConfig

# Keeps a mean over no valid token from dividing by 0; the same constant as in NeMo-RL.
_COUNT_EPSILON = 1e-8
# Limit of the KL estimates, nats.
_KL_LIMIT = 10.0
# The attribute under which ``logs`` stores the names in a loss function.
LOGGED_MEANS = "logged_means"

T = TypeVar("T", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalCounts:
    """The counts that normalise the loss, over all ranks and micro-batches of an update. Samples whose
    sample_mask is 0 do not count."""

    num_tokens: int
    num_samples: int

    def token_shares(self, mask: Tensor) -> Tensor:
        """Return each token's share of the mean over all tokens: ``mask``, of any shape, divided by their
        number."""
        return mask / (self.num_tokens + _COUNT_EPSILON)

    def share(self, *, is_token_level: bool) -> float:
        """Return the factor that normalises losses and gradients which were computed with counts of 1.

        A token's weight is proportional to it. ``is_token_level`` selects the number of tokens, rather than
        of samples, as the divisor.
        """
        count = self.num_tokens if is_token_level else self.num_samples
        return (1 + _COUNT_EPSILON) / (count + _COUNT_EPSILON)


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTokens:
    """The M scored tokens of a micro-batch of n samples: all tokens that the policy generated.

    Every tensor is [M] float32 unless said otherwise, and entry i of each belongs to the same token.
    Log-probs are in nats. ``logprobs``, ``entropy`` and ``topk_logprobs`` carry the gradient. ``weights`` are
    each token's share of the global mean; ``mask`` is 1 on tokens of samples that train and 0 on the others.
    """

    logprobs: Tensor
    prev_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    mask: Tensor
    sample_index: Tensor  # [M] int64, which of the n samples a token belongs to
    response_lengths: Tensor  # [n] float32, tokens of each sample
    reference_logprobs: Tensor | None = None  # None without a KL penalty
    generation_logprobs: Tensor | None = None  # given where loss_traits.reads_generation_logprobs
    entropy: Tensor | None = None  # None without an entropy coefficient
    entropy_gate: Tensor | None = None  # 0 on tokens without a policy gradient; None where all have one
    likelihood_weights: Tensor | None = None  # of each token's log-prob; None without a likelihood term
    entropy_coefs: Tensor | None = None  # of each token's entropy; None where cfg.entropy_coef is
    # [M, k], with a gradient: the policy's log-probs of the tokens in the column teacher_topk_ids. None for a
    # loss that does not read that column.
    topk_logprobs: Tensor | None = None
    # The columns that a user's own loss declares, by name: [M, *inner_shape] for a value per token; otherwise
    # [n, *inner_shape], which ``values[sample_index]`` spreads over the tokens, or a list of n values.
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TokenMean:
    """A metric that is sum(values * weights) / sum(weights) over all tokens of the global batch; both are
    [M]."""

    values: Tensor
    weights: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """The result of a loss: ``loss``, the scalar to differentiate, and values without gradient for metrics.

    ``loss`` is the sum of weight times loss over the micro-batch's tokens. Added over all micro-batches and
    ranks, it is the mean over the global batch. ``ratio`` and ``clipped_ratio`` are [M]; a user's loss
    that has no ratio gives ones. ``means`` are metrics by name: kl_penalty (not multiplied by its
    coefficient; 0 without a reference); entropy, is_oob_ratio and off_policy_masked where the configuration
    asks for them;
    clip_fraction_low and clip_fraction_high of a loss that clips; and the names given to ``logs``.
    """

    loss: Tensor
    ratio: Tensor
    clipped_ratio: Tensor
    means: Mapping[str, TokenMean]


def logs(*names: str) -> Callable[[T], T]:
    """Mark a user's own loss with the names of the ``means`` that it returns besides the built-in ones."""

    def mark(loss: T) -> T:
        setattr(loss, LOGGED_MEANS, names)
        return loss

    return mark


def token_weights(
    sample_index: Tensor,
    sample_mask: Tensor,
    response_lengths: Tensor,
    counts: GlobalCounts,
    cfg: LossConfig,
) -> Tensor:
    """Compute each token's share of the global mean, [M] float32; 0 where its sample is masked.

    ``sample_index`` [M] int64 says which of the micro-batch's n samples a token belongs to;
    ``sample_mask`` and ``response_lengths`` are [n] float32. At token level a share is 1 / tokens of the
    global batch. At sequence level it is 1 / (tokens of the sample x samples of the global batch); Dr.GRPO
    (arXiv 2503.20783) divides by a constant, ``sequence_length_normalizer``, instead of the sample's tokens.
    """
    if cfg.token_level_loss:
        per_sample = counts.token_shares(sample_mask)
    elif cfg.sequence_length_normalizer is not None:
        divisor = cfg.sequence_length_normalizer * (counts.num_samples + _COUNT_EPSILON)
        per_sample = sample_mask / divisor
    else:
        per_sample = sample_mask / (response_lengths.clamp(min=1) * (counts.num_samples + _COUNT_EPSILON))
    return per_sample[sample_index]


def clipped_policy_gradient(
    ratio: Tensor, clipped_ratio: Tensor, advantages: Tensor, *, dual_clip: float | None
) -> Tensor:
    """Compute PPO's pessimistic surrogate per token, [M]: max(-A r, -A clip(r)) (arXiv 1707.06347).

    With ``dual_clip`` c > 1 the loss is at most -A c where A < 0, which bounds the push away from
    tokens that became much more likely (arXiv 1912.09729).
    """
    loss = torch.maximum(-advantages * ratio, -advantages * clipped_ratio)
    if dual_clip is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -advantages * dual_clip), loss)


def cispo(logprobs: Tensor, clipped_ratio: Tensor, advantages: Tensor) -> Tensor:
    """Compute CISPO's loss -A stop_gradient(clip(r)) log p per token, [M] (arXiv 2506.13585).

    Clipping bounds a token's weight and never takes its gradient away.
    """
    return -advantages * clipped_ratio.detach() * logprobs


def reinforce(logprobs: Tensor, advantages: Tensor) -> Tensor:
    """Compute -A log p per token, [M]; it has no ratio and no clipping."""
    return -advantages * logprobs


def kl_to_reference(logprobs: Tensor, reference_logprobs: Tensor, kind: KLType) -> Tensor:
    """Estimate KL(policy || reference) per token, [M], nats.

    With x = reference - policy, limited to +-20: k1 = -x, k2 = x^2 / 2, k3 = e^x - 1 - x. The factor
    exp(logp - stop_gradient(logp)), whose value is 1, adds the score-function part of the gradient
    (arXiv 2506.09477). The estimate is limited to +-10, as in NeMo-RL, after the factor is applied, so that
    no gradient flows where that limit applies; if it were limited before, the factor would push the policy
    away from the reference there.
    """
    log_ratio = limited(reference_logprobs - logprobs)
    if kind is KLType.k1:
        estimate = -log_ratio
    elif kind is KLType.k2:
        estimate = log_ratio.square() / 2
    else:
        estimate = torch.expm1(log_ratio) - log_ratio  # e^x - 1 itself has few digits near 0
    weighted = estimate * (logprobs - logprobs.detach()).exp()
    return weighted.clamp(-_KL_LIMIT, _KL_LIMIT)


def kl_to_go(kl: Tensor, lengths: Tensor) -> Tensor:
    """Compute K_t, the sum of ``kl`` from token t to the end of its sample, [sum of lengths] float32.

    ``kl`` [sum of lengths] float32 is packed, samples one after the other, and is 0 on tokens that do not
    count; ``lengths`` [N] int64 are the samples' lengths. A sample with a value that is not finite becomes
    NaN throughout; other samples are not affected.
    """
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=kl.device), lengths)
    is_spoiled = (
        torch.zeros(len(lengths), device=kl.device).index_add_(0, owner, (~kl.isfinite()).float()) > 0
    )
    up_to = kl.double().masked_fill(is_spoiled[owner], 0.0).cumsum(0)
    total = torch.cat((up_to.new_zeros(1), up_to))[lengths.cumsum(0)]
    before = torch.cat((up_to.new_zeros(1), up_to[:-1]))
    return (total[owner] - before).masked_fill(is_spoiled[owner], torch.nan).float()


def policy_ratio(tokens: LossTokens, cfg: LossConfig) -> Tensor:
    """Compute the ratio exp(logp - prev) of each token, [M].

    With GSPO (arXiv 2507.18071) a token's ratio is the geometric mean over its sample. The log-ratio, or with
    GSPO its mean, is limited to +-20; beyond this limit the ratio has no gradient.
    """
    log_ratio = tokens.logprobs - tokens.prev_logprobs
    if has_sample_ratio(cfg):
        log_ratio = sample_means(log_ratio, tokens.sample_index, tokens.response_lengths)
    return limited(log_ratio).exp()


def clipped(ratio: Tensor, clip_min: float, clip_max: float) -> Tensor:
    """Limit a ratio to [1 - clip_min, 1 + clip_max]."""
    return ratio.clamp(1 - clip_min, 1 + clip_max)


def with_clip_fractions(terms: LossTerms, tokens: LossTokens, is_low: Tensor, is_high: Tensor) -> LossTerms:
    """Return the terms with two more means: clip_fraction_low, the share of tokens that the clip holds at its
    lower bound, and clip_fraction_high, at its upper bound."""
    held = {"clip_fraction_low": is_low, "clip_fraction_high": is_high}
    fractions = {
        name: TokenMean(is_held.to(tokens.mask.dtype), tokens.mask) for name, is_held in held.items()
    }
    return replace(terms, means={**terms.means, **fractions})


def policy_gradient(
    tokens: LossTokens,
    cfg: LossConfig,
    ratio_clip_min: float,
    ratio_clip_max: float,
    ratio_clip_c: float | None,
) -> LossTerms:
    """Compute PPO's clipped surrogate, or GSPO where the kind has one ratio per sample."""
    ratio = policy_ratio(tokens, cfg)
    return surrogate_terms(ratio, tokens, cfg, ratio_clip_min, ratio_clip_max, ratio_clip_c)


def surrogate_terms(
    ratio: Tensor,
    tokens: LossTokens,
    cfg: LossConfig,
    clip_min: float,
    clip_max: float,
    dual_clip: float | None,
) -> LossTerms:
    """Return the terms of PPO's surrogate with this ratio, [M].

    The clip holds a token, so that it has no gradient, where A < 0 and the ratio is below the range, where A
    > 0 and it is above, or where A < 0 and it is above ``dual_clip``. With one ratio per sample, the clip
    holds all tokens of a sample or none.
    """
    clipped_ratio, advantages = clipped(ratio, clip_min, clip_max), tokens.advantages
    per_token = clipped_policy_gradient(ratio, clipped_ratio, advantages, dual_clip=dual_clip)
    terms = loss_terms(per_token, ratio, clipped_ratio, tokens, cfg)
    is_low = (terms.ratio < terms.clipped_ratio) & (advantages < 0)
    is_high = (terms.ratio > terms.clipped_ratio) & (advantages > 0)
    if dual_clip is not None:
        is_high |= (advantages < 0) & (terms.ratio > dual_clip)
    return with_clip_fractions(terms, tokens, is_low, is_high)


def cispo_loss(
    tokens: LossTokens, cfg: LossConfig, ratio_clip_min: float, ratio_clip_max: float
) -> LossTerms:
    """Compute CISPO's loss.

    Its clip bounds a token's weight on either side, whatever the sign of A, and the token keeps its gradient.
    Tokens with A = 0 do not count as clipped.
    """
    ratio = policy_ratio(tokens, cfg)
    clipped_ratio = clipped(ratio, ratio_clip_min, ratio_clip_max)
    per_token = cispo(tokens.logprobs, clipped_ratio, tokens.advantages)
    terms = loss_terms(per_token, ratio, clipped_ratio, tokens, cfg)
    has_advantage = tokens.advantages != 0
    is_low = (terms.ratio < terms.clipped_ratio) & has_advantage
    is_high = (terms.ratio > terms.clipped_ratio) & has_advantage
    return with_clip_fractions(terms, tokens, is_low, is_high)


def reinforce_loss(tokens: LossTokens, cfg: LossConfig) -> LossTerms:
    """Compute REINFORCE. Nothing is clipped, so metrics get the ratio as the clipped ratio too."""
    ratio = policy_ratio(tokens, cfg)
    return loss_terms(reinforce(tokens.logprobs, tokens.advantages), ratio, ratio, tokens, cfg)


def loss_terms(
    per_token: Tensor, ratio: Tensor, clipped_ratio: Tensor, tokens: LossTokens, cfg: LossConfig
) -> LossTerms:
    """Make a micro-batch's ``LossTerms`` from a policy-gradient term ``per_token``, [M].

    Where the configuration asks for it, the term is multiplied by the importance-sampling correction and left
    out on some tokens; KL, entropy and the likelihood of right answers (VAPO, arXiv 2504.05118, eq. 10) are
    added. ``loss`` is the sum over tokens of weight times term.
    """
    means: dict[str, TokenMean] = {}
    if cfg.use_importance_sampling_correction and tokens.generation_logprobs is not None:
        correction = importance_correction(
            tokens.prev_logprobs,
            tokens.generation_logprobs,
            tokens.sample_index,
            tokens.response_lengths,
            cfg,
        )
        per_token = per_token * correction.weights
        means["is_oob_ratio"] = TokenMean(correction.is_out_of_bounds, correction.counts * tokens.mask)
    if cfg.off_policy_mask_threshold is not None and tokens.generation_logprobs is not None:
        gate = on_policy_gate(
            tokens.logprobs,
            tokens.generation_logprobs,
            tokens.advantages,
            tokens.sample_index,
            tokens.response_lengths,
            cfg.off_policy_mask_threshold,
        )
        per_token = per_token * gate
        means["off_policy_masked"] = TokenMean(1 - gate, tokens.mask)
    if tokens.entropy_gate is not None:
        per_token = per_token * tokens.entropy_gate
    kl = torch.zeros_like(tokens.prev_logprobs)
    if tokens.reference_logprobs is not None:
        kl = kl_to_reference(tokens.logprobs, tokens.reference_logprobs, cfg.reference_policy_kl_type)
        if cfg.use_on_policy_kl_approximation and tokens.generation_logprobs is not None:
            kl = kl * kl_weights(tokens.logprobs, tokens.generation_logprobs)
        if not cfg.use_kl_in_reward:
            per_token = per_token + cfg.reference_policy_kl_penalty * kl
    means["kl_penalty"] = TokenMean(kl.detach(), tokens.mask)
    if tokens.entropy is not None and cfg.entropy_coef is not None:
        coefficient = cfg.entropy_coef if tokens.entropy_coefs is None else tokens.entropy_coefs
        per_token = per_token - coefficient * tokens.entropy
        means["entropy"] = TokenMean(tokens.entropy.detach(), tokens.mask)
    loss = (tokens.weights * per_token).sum()
    if tokens.likelihood_weights is not None:
        loss = loss - (tokens.likelihood_weights * tokens.logprobs).sum()
    return LossTerms(
        loss=loss,
        ratio=ratio.detach(),
        clipped_ratio=clipped_ratio.detach(),
        means=means,
    )
