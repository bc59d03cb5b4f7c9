"""The way from scored tokens to loss and metrics, which all training backends share.

backend, per micro-batch       here                                      algorithms
  TokenScores ───────────────▶ + columns, advantages, global counts ───▶ policy_loss
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
from nemo_like.algorithms.losses import (
    LOGGED_MEANS,
    GlobalCounts,
    LossTerms,
    LossTokens,
    TokenMean,
    policy_loss,
    token_weights,
)
from nemo_like.batch.columns import (
    GENERATION_LOGPROBS,
    PREV_LOGPROBS,
    REFERENCE_LOGPROBS,
    Column,
    Layout,
    declared_by,
)
from nemo_like.batch.meta import GlobalBatch
from nemo_like.batch.tags import ADVANTAGE, KL_SCALE, SAMPLE_MASK
from nemo_like.config.derived import is_own_loss, scores_prev_logprobs
from nemo_like.config.import_path import load_by_path
from nemo_like.config.schema import LossConfig
from nemo_like.policy.batch import ModelInputs, PolicyBatch
from nemo_like.policy.policy_columns import training_reads
from nemo_like.policy.reward_kl import reward_kl
from nemo_like.policy.train_metrics import KNOWN_MEANS, TrainMetrics
from nemo_like.policy.update_watch import UpdateWatch

# Returns a micro-batch's part of the loss, a scalar to differentiate. The parts of all micro-batches and
# ranks are summed, and so are their gradients: nothing is averaged over ranks.
LossFunction = Callable[[TokenScores, ModelInputs], Tensor]


def own_reads(cfg: LossConfig) -> tuple[Column, ...]:
    """Import the user's own loss, if one is configured, and return the columns that it declares to read.

    Raises ValueError when the loss cannot be found, ColumnError when what it declares is not a column.
    """
    return declared_by(f"loss_fn.kind={cfg.kind}", load_by_path(cfg.kind)).reads if is_own_loss(cfg) else ()


def own_means(cfg: LossConfig) -> tuple[str, ...]:
    """Import the user's own loss, if one is configured, and return the names of the means it announces."""
    return getattr(load_by_path(cfg.kind), LOGGED_MEANS, ()) if is_own_loss(cfg) else ()


def update_objective(
    cfg: LossConfig,
    batch: PolicyBatch,
    update: GlobalBatch,
    metrics: TrainMetrics,
    watch: UpdateWatch | None = None,
) -> LossFunction:
    """Return the loss of one optimizer update; the backend calls it once per micro-batch.

    Each call records into ``metrics``, and into ``watch`` where there are tripwires. It raises TypeError or
    ValueError when the user's own loss returns anything but well-formed LossTerms.
    """
    compute, own = _computed_by(cfg), own_reads(cfg)
    counts = GlobalCounts(num_tokens=update.num_tokens, num_samples=update.num_samples)
    kl_to_go: Tensor | None = None
    if cfg.use_kl_in_reward:
        kl_to_go = reward_kl(batch, cfg.reference_policy_kl_type)
    # Where no earlier phase scored the tokens, trainer and engine are compared while the weights are still
    # those that sampled.
    compares_here = not scores_prev_logprobs(cfg) and metrics.num_updates == 0

    def loss(scores: TokenScores, inputs: ModelInputs) -> Tensor:
        tokens = _loss_tokens(scores, inputs, batch, counts, cfg)
        if own:
            tokens = replace(tokens, columns={one.name: _own(one, batch, inputs, tokens.mask) for one in own})
        if kl_to_go is not None:
            scale = batch.sample_values[KL_SCALE.name][inputs.rows][inputs.sample_index]
            lost = torch.where(tokens.mask > 0, scale * kl_to_go[inputs.packed_index], 0.0)
            tokens = replace(tokens, advantages=tokens.advantages - lost)
        terms = compute(tokens, cfg)
        metrics.add_micro_batch(terms, tokens.mask)
        if compares_here and tokens.generation_logprobs is not None:
            gaps = divergences(tokens.logprobs.detach(), tokens.generation_logprobs)
            metrics.add_means({name: TokenMean(gap, tokens.mask) for name, gap in gaps.items()})
        if watch is not None:
            watch.add(scores, inputs, update, terms.loss, metrics.num_updates)
        return terms.loss

    return loss


def _own(column: Column, batch: PolicyBatch, inputs: ModelInputs, mask: Tensor) -> Tensor | list[Any]:
    """Return a column that the user's loss reads. Tensors per token are 0 on tokens that do not train, where
    the column itself may hold nan."""
    values = batch.values_of(column, inputs)
    if column.layout is not Layout.per_token or not isinstance(values, Tensor):
        return values
    return values.masked_fill((mask == 0).view(-1, *(1 for _ in column.inner_shape)), 0)


def _computed_by(cfg: LossConfig) -> Callable[[LossTokens, LossConfig], LossTerms]:
    """Return the function behind ``loss_fn.kind``; a user's own is wrapped in a check of what it returns."""
    if not is_own_loss(cfg):
        return policy_loss
    own, named = load_by_path(cfg.kind), (*KNOWN_MEANS, *own_means(cfg))

    def checked(tokens: LossTokens, cfg: LossConfig) -> LossTerms:
        terms: Any = own(tokens, cfg)
        if not isinstance(terms, LossTerms) or not isinstance(terms.loss, Tensor):
            what = f"LossTerms(loss={terms.loss!r})" if isinstance(terms, LossTerms) else type(terms).__name__
            raise TypeError(f"loss_fn.kind={cfg.kind} returned {what}, not LossTerms with a tensor")
        if unknown := terms.means.keys() - set(named):
            raise ValueError(
                f"loss_fn.kind={cfg.kind} gives the means {sorted(unknown)}, which it does not announce; "
                f"mark it with nemo_like.algorithms.losses.logs, or choose of {', '.join(named)}"
            )
        per_token = {"ratio": terms.ratio, "clipped_ratio": terms.clipped_ratio}
        for name, one in terms.means.items():
            per_token |= {f"means[{name!r}].values": one.values, f"means[{name!r}].weights": one.weights}
        wrong = {name: list(one.shape) for name, one in per_token.items() if one.shape != tokens.mask.shape}
        if terms.loss.ndim or wrong:
            shapes = {"loss": list(terms.loss.shape), **wrong}
            raise ValueError(
                f"loss_fn.kind={cfg.kind} returned the shapes {shapes} for {len(tokens.mask)} tokens; the "
                "loss is a scalar, everything else has a value per token"
            )
        if not terms.loss.isfinite():
            raise ValueError(f"loss_fn.kind={cfg.kind} returned a loss of {terms.loss.item()}")
        return terms

    return checked


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
