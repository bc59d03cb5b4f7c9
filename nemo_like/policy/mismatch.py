"""How far the trainer's log-probs are from the generation engine's, per sample and over the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_like.data_plane.columns import GENERATION_LOGPROBS, RESPONSE_MASK
from nemo_like.observability.metrics import Metric, mean
from nemo_like.policy.batch import PolicyBatch
from nemo_like.policy.interfaces import SAMPLE_MASK


@dataclass(frozen=True, slots=True)
class Mismatch:
    """``mult_prob_error[i]`` is sample i's mean of exp|generation - prev| over its response tokens, 1 where
    both agree or there is none. ``metrics`` are means over the response tokens of samples that train."""

    mult_prob_error: list[float]
    metrics: dict[str, Metric]


def logprob_mismatch(batch: PolicyBatch, prev_logprobs: Tensor) -> Mismatch:
    """Compare packed [sum of lengths] float32 ``prev_logprobs`` with the batch's generation log-probs.

    The KL figures are k3 estimates, unclamped: gen_kl_error of KL(generation || trainer),
    policy_kl_error of KL(trainer || generation), js_divergence_error the mean of both sides' KL to the
    50/50 mixture.
    """
    prev = prev_logprobs
    generation = batch.columns[GENERATION_LOGPROBS.name].cpu()
    response_mask = batch.columns[RESPONSE_MASK.name].float()
    difference = prev - generation
    mult_prob_error = difference.abs().exp()
    ratio = difference.exp()
    mixture = torch.logaddexp(prev, generation) - torch.log(torch.tensor(2.0))
    per_token = {
        "token_mult_prob_error": mult_prob_error,
        "gen_kl_error": ratio - 1 - difference,
        "policy_kl_error": (-difference).exp() - 1 + difference,
        "js_divergence_error": (_k3(prev - mixture) + _k3(generation - mixture)) / 2,
        "sampling_importance_ratio": ratio,
        "approx_entropy": -ratio * prev,
    }
    sample_mask = batch.sample_values[SAMPLE_MASK].cpu()
    weights = response_mask * torch.repeat_interleave(sample_mask, batch.lengths)
    totals = (
        torch.stack([*per_token.values(), torch.ones_like(weights)]).double() @ weights.double()
    ).tolist()
    lengths = batch.response_lengths.cpu()
    per_sample = batch.sum_per_sample(mult_prob_error * response_mask) / lengths.clamp(min=1)
    return Mismatch(
        mult_prob_error=torch.where(lengths > 0, per_sample, torch.ones(())).tolist(),
        metrics={name: mean(total, totals[-1]) for name, total in zip(per_token, totals, strict=False)},
    )


def _k3(log_ratio: Tensor) -> Tensor:
    """exp(x) - 1 - x, which is >= 0 and 0 only at x = 0."""
    return log_ratio.exp() - 1 - log_ratio
