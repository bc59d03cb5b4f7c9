"""The way from scored tokens to loss and metrics, which all training backends share.

backend, per micro-batch       here                                      algorithms
  TokenScores ───────────────▶ + columns, advantages, global counts ───▶ loss_fn.kind, checked
  backward ◀───────────────────── loss                                      │
                               TrainMetrics ◀───────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nemo_like.algorithms.divergence import divergences
from nemo_like.algorithms.logprobs import TokenScores
from nemo_like.algorithms.losses import GlobalCounts, LossTokens, TokenMean, token_weights
from nemo_like.batch.columns import (
    GENERATION_LOGPROBS,
    PREV_LOGPROBS,
    REFERENCE_LOGPROBS,
    Column,
    Layout,
)
from nemo_like.batch.meta import GlobalBatch
from nemo_like.batch.tags import ADVANTAGE, KL_SCALE, SAMPLE_MASK
from nemo_like.config.derived import scores_prev_logprobs
from nemo_like.config.schema import LossConfig
from nemo_like.policy.batch import ModelInputs, PolicyBatch
from nemo_like.policy.checked_loss import CheckedLoss, own_reads
from nemo_like.policy.policy_columns import training_reads
from nemo_like.policy.reward_kl import reward_kl
from nemo_like.policy.train_metrics import TrainMetrics
from nemo_like.policy.update_watch import UpdateWatch

# Returns a micro-batch's part of the loss, a scalar to differentiate. The parts of all micro-batches and
# ranks are summed, and so are their gradients: nothing is averaged over ranks.
LossFunction = Callable[[TokenScores, ModelInputs], Tensor]


def update_objective(
    cfg: LossConfig,
    batch: PolicyBatch,
    update: GlobalBatch,
    metrics: TrainMetrics,
    watch: UpdateWatch | None = None,
) -> LossFunction:
    """Return the loss of one optimizer update; the backend calls it once per micro-batch.

    Each call records into ``metrics``, and into ``watch`` where there are tripwires. It raises LossFailed
    when the loss raises or returns anything but well-formed LossTerms.
    """
    compute, own = CheckedLoss(cfg), own_reads(cfg)
    counts = GlobalCounts(num_tokens=update.num_tokens, num_samples=update.num_samples)
    kl_to_go: Tensor | None = None
    if cfg.use_kl_in_reward:
        kl_to_go = reward_kl(batch, cfg.reference_policy_kl_type)
    # Where no earlier phase scored the tokens, trainer and engine are compared while the weights are still
    # those that sampled.
    compares_here = not scores_prev_logprobs(cfg) and metrics.num_updates == 0

    def loss(scores: TokenScores, inputs: ModelInputs) -> Tensor:
        tokens = _loss_tokens(scores, inputs, batch, counts, cfg)
        columns = {one.name: _own(one, batch, inputs, tokens.mask) for one in own}
        if kl_to_go is not None:
            scale = batch.sample_values[KL_SCALE.name][inputs.rows][inputs.sample_index]
            lost = torch.where(tokens.mask > 0, scale * kl_to_go[inputs.packed_index], 0.0)
            tokens = replace(tokens, advantages=tokens.advantages - lost)
        terms = compute(tokens, columns, inputs.rows)
        metrics.add_micro_batch(terms, tokens.mask)
        if compares_here and tokens.generation_logprobs is not None:
            gaps = divergences(tokens.logprobs.detach(), tokens.generation_logprobs)
            metrics.add_means({name: TokenMean(gap, tokens.mask) for name, gap in gaps.items()})
        if watch is not None:
            watch.add(scores, inputs, update, terms.loss, metrics.num_updates)
        return terms.loss

    return loss


def _own(column: Column, batch: PolicyBatch, inputs: ModelInputs, mask: Tensor) -> Tensor | list[Any]:
    """Return a column that the loss declares to read. Tensors per token are 0 on tokens that do not train,
    where the column itself may hold nan."""
    values = batch.values_of(column, inputs)
    if column.layout is not Layout.per_token or not isinstance(values, Tensor):
        return values
    return values.masked_fill((mask == 0).view(-1, *(1 for _ in column.inner_shape)), 0)


def _loss_tokens(
    scores: TokenScores,
    inputs: ModelInputs,
    batch: PolicyBatch,
    counts: GlobalCounts,
    cfg: LossConfig,
) -> LossTokens:
    """Collect what the loss needs of the scored tokens; every token gets its sample's advantage."""
    sample_index = inputs.sample_index
    sample_mask = batch.sample_values[SAMPLE_MASK.name][inputs.rows]
    response_lengths = batch.response_lengths[inputs.rows]
    mask = sample_mask[sample_index]
    current = scores.logprobs.detach()
    reads = training_reads(cfg)

    def compared(column: Column) -> Tensor | None:
        if column not in reads:
            return None
        # A sample may be masked because one of its log-probs is nan; nan times a weight of 0 is still nan.
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
