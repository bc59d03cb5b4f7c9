"""From scored tokens to loss and metrics: what every training backend shares.

backend, per micro-batch       here                                      algorithms
  TokenScores ───────────────▶ + columns, advantages, global counts ───▶ policy_loss
  backward ◀───────────────────── loss                                      │
                               TrainMetrics ◀───────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from nemo_like.algorithms.divergence import divergences
from nemo_like.algorithms.logprobs import TokenScores
from nemo_like.algorithms.losses import GlobalCounts, LossTokens, TokenMean, policy_loss, token_weights
from nemo_like.batch.columns import (
    GENERATION_LOGPROBS,
    INPUT_IDS,
    PREV_LOGPROBS,
    REFERENCE_LOGPROBS,
    RESPONSE_MASK,
    Column,
)
from nemo_like.batch.meta import GlobalBatch
from nemo_like.batch.tags import ADVANTAGE, KL_SCALE, SAMPLE_MASK
from nemo_like.config.loss_rules import scores_prev_logprobs
from nemo_like.config.schema import LossConfig
from nemo_like.policy.batch import ModelInputs, PolicyBatch
from nemo_like.policy.reward_kl import reward_kl
from nemo_like.policy.train_metrics import TrainMetrics

# A micro-batch's part of the loss, a scalar to differentiate. Parts of all micro-batches and ranks are
# summed, and so are their gradients: no averaging over ranks.
LossFunction = Callable[[TokenScores, ModelInputs], Tensor]


def train_reads(cfg: LossConfig) -> tuple[Column, ...]:
    """The columns that training fetches."""
    reads = [INPUT_IDS, RESPONSE_MASK]
    if scores_prev_logprobs(cfg):
        reads.append(PREV_LOGPROBS)
    if cfg.reference_policy_kl_penalty > 0:
        reads.append(REFERENCE_LOGPROBS)
    if cfg.use_importance_sampling_correction or not scores_prev_logprobs(cfg):
        reads.append(GENERATION_LOGPROBS)
    return tuple(reads)


def update_objective(
    cfg: LossConfig, batch: PolicyBatch, update: GlobalBatch, metrics: TrainMetrics
) -> LossFunction:
    """The loss of one optimizer update, to be called once per micro-batch; records into ``metrics``."""
    counts = GlobalCounts(num_tokens=update.num_tokens, num_samples=update.num_samples)
    kl_to_go: Tensor | None = None
    if cfg.use_kl_in_reward:
        kl_to_go = reward_kl(batch, cfg.reference_policy_kl_type)
    # Where no earlier phase scored the tokens, trainer and engine are compared while the weights are still
    # those that sampled.
    compares_here = not scores_prev_logprobs(cfg) and metrics.num_updates == 0

    def loss(scores: TokenScores, inputs: ModelInputs) -> Tensor:
        tokens = _loss_tokens(scores, inputs, batch, counts, cfg)
        if kl_to_go is not None:
            scale = batch.sample_values[KL_SCALE.name][inputs.rows][inputs.sample_index]
            lost = torch.where(tokens.mask > 0, scale * kl_to_go[inputs.packed_index], 0.0)
            tokens = replace(tokens, advantages=tokens.advantages - lost)
        terms = policy_loss(tokens, cfg)
        metrics.add_micro_batch(terms, tokens.mask)
        if compares_here and tokens.generation_logprobs is not None:
            gaps = divergences(tokens.logprobs.detach(), tokens.generation_logprobs)
            metrics.add_means({name: TokenMean(gap, tokens.mask) for name, gap in gaps.items()})
        return terms.loss

    return loss


def _loss_tokens(
    scores: TokenScores,
    inputs: ModelInputs,
    batch: PolicyBatch,
    counts: GlobalCounts,
    cfg: LossConfig,
) -> LossTokens:
    """The scored tokens with what the loss compares them to; advantages spread over their sample."""
    sample_index = inputs.sample_index
    sample_mask = batch.sample_values[SAMPLE_MASK.name][inputs.rows]
    response_lengths = batch.response_lengths[inputs.rows]
    mask = sample_mask[sample_index]
    current = scores.logprobs.detach()

    def compared(column: Column) -> Tensor | None:
        if column not in train_reads(cfg):
            return None
        # A sample may be masked because a log-prob of it is no number, which times 0 would still be none.
        return torch.where(mask > 0, batch.columns[column.name][inputs.packed_index], current)

    generation = compared(GENERATION_LOGPROBS)
    prev = generation if cfg.use_generation_logprobs_as_prev else compared(PREV_LOGPROBS)
    return LossTokens(
        logprobs=scores.logprobs,
        prev_logprobs=current if prev is None else prev,
        advantages=batch.sample_values[ADVANTAGE.name][inputs.rows][sample_index],
        weights=token_weights(sample_index, sample_mask, response_lengths, counts, cfg),
        mask=mask,
        sample_index=sample_index,
        response_lengths=response_lengths,
        reference_logprobs=compared(REFERENCE_LOGPROBS),
        generation_logprobs=generation,
        entropy=scores.entropy,
    )
