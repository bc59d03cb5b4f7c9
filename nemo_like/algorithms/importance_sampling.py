"""Importance-sampling correction for the difference between the engine that sampled and the trainer.

Both have the same weights, but different kernels and precisions, so the distribution that a token was drawn
from differs slightly from the distribution that is differentiated. The loss multiplies each token's loss by
w = p_trainer / p_engine of the token, or with GSPO of its whole sample. The configuration bounds w in one
of three ways, or not at all. Tensors are packed: they hold the M scored tokens of all samples, and
``sample_index`` says which sample a token belongs to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_like.algorithms.logprobs import limited
from nemo_like.algorithms.loss_traits import has_sample_ratio
from nemo_like.algorithms.options import ImportanceSamplingType, LossConfig


@dataclass(frozen=True, slots=True)
class ImportanceCorrection:
    """The result of ``importance_correction``; every tensor is [M] float32.

    ``weights`` multiply the token losses. ``is_out_of_bounds`` is 1 on tokens whose weight was clamped or
    zeroed. ``counts`` says how much each token counts in the mean of ``is_out_of_bounds``: 1, or, with GSPO
    or seq_mask, which judge whole samples, 1 / the tokens of its sample.
    """

    weights: Tensor
    is_out_of_bounds: Tensor
    counts: Tensor


def sample_means(values: Tensor, sample_index: Tensor, response_lengths: Tensor) -> Tensor:
    """Replace each token's value by the mean of ``values`` over its sample's tokens; [M].

    ``sample_index`` [M] int64 says which of n samples a token belongs to; ``response_lengths`` [n]
    float32 says how many tokens each sample has.
    """
    sums = torch.zeros_like(response_lengths).index_add(0, sample_index, values)
    return (sums / response_lengths.clamp(min=1))[sample_index]


@torch.no_grad()
def importance_correction(
    prev_logprobs: Tensor,
    generation_logprobs: Tensor,
    sample_index: Tensor,
    response_lengths: Tensor,
    cfg: LossConfig,
) -> ImportanceCorrection:
    """Compute w = exp(prev - generation), bounded as ``truncated_importance_sampling_type`` says.

    Each token has its own w. With GSPO (arXiv 2507.18071) a sample has one w, the product over its tokens, as
    in NeMo-RL. Log-ratios are limited to +-20. The result carries no gradient.

    tis: clamped to [min, max] (F. Yao et al., "Your efficient RL framework secretly brings you
    off-policy RL training"). icepop: zero outside [min, max] (Ling team, arXiv 2510.18855). seq_mask:
    zero on samples whose geometric-mean w is outside [min, max], w itself on the others. None: w.
    """
    log_weights = judged = limited(prev_logprobs - generation_logprobs)
    counts = torch.ones_like(log_weights)
    is_masking = cfg.truncated_importance_sampling_type is ImportanceSamplingType.seq_mask
    is_of_samples = has_sample_ratio(cfg)
    if is_masking or is_of_samples:
        judged = sample_means(log_weights, sample_index, response_lengths)
        counts = 1 / response_lengths[sample_index]
    if is_of_samples:
        # The product: the mean times the number of tokens.
        log_weights = judged = limited(judged * response_lengths[sample_index])
    weights = log_weights.exp()
    low, high = _bounds(cfg)
    is_outside = (judged.exp() < low) | (judged.exp() > high)
    if cfg.truncated_importance_sampling_type is ImportanceSamplingType.tis:
        weights = weights.clamp(low, high)
    else:
        weights = weights.masked_fill(is_outside, 0.0)
    return ImportanceCorrection(weights, is_outside.float(), counts)


def _bounds(cfg: LossConfig) -> tuple[float, float]:
    """Return the configured (min, max); an unset bound is 0 or infinity, which bounds nothing."""
    low, high = cfg.truncated_importance_sampling_ratio_min, cfg.truncated_importance_sampling_ratio
    return 0.0 if low is None else low, torch.inf if high is None else high
