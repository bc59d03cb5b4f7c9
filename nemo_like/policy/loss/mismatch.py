"""How far the trainer's log-probs are from the generation engine's, per sample and over the batch."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nemo_like.algorithms.divergence import DIVERGENCES, divergences
from nemo_like.batch.columns import GENERATION_LOGPROBS, RESPONSE_MASK
from nemo_like.batch.tags import SAMPLE_MASK
from nemo_like.observability.metrics import Metric, mean
from nemo_like.policy.batch.policy_batch import PolicyBatch


@dataclass(frozen=True, slots=True)
class Mismatch:
    """How far the log-probs of trainer and engine are apart.

    ``mult_prob_error[i]`` is sample i's mean of exp|generation - prev| over its response tokens; it is 1
    where both agree on every token, or where there is no token. ``metrics`` are means over the response
    tokens of samples that are not masked so far; a sample may be masked later because of its
    ``mult_prob_error``.
    """

    mult_prob_error: list[float]
    metrics: dict[str, Metric]


def logprob_mismatch(batch: PolicyBatch, prev_logprobs: Tensor) -> Mismatch:
    """Compare ``prev_logprobs``, packed [sum of lengths] float32, with the batch's generation log-probs.

    The metrics are the means of the figures that ``divergences`` computes per token.
    """
    generation = batch.columns[GENERATION_LOGPROBS.name].cpu()
    response_mask = batch.columns[RESPONSE_MASK.name].float()
    per_token = divergences(prev_logprobs, generation)
    sample_mask = batch.sample_values[SAMPLE_MASK.name].cpu()
    weights = response_mask * torch.repeat_interleave(sample_mask, batch.lengths)
    figures = torch.stack([*(per_token[name] for name in DIVERGENCES), torch.ones_like(weights)])
    *totals, weight = (figures.double() @ weights.double()).tolist()
    lengths = batch.response_lengths.cpu()
    errors = per_token["token_mult_prob_error"] * response_mask
    per_sample = batch.sum_per_sample(errors) / lengths.clamp(min=1)
    return Mismatch(
        mult_prob_error=torch.where(lengths > 0, per_sample, torch.ones(())).tolist(),
        metrics={name: mean(total, weight) for name, total in zip(DIVERGENCES, totals, strict=True)},
    )
