"""The way from scored tokens to loss and metrics, which all training backends share.

A worker group has one objective: the policy's and a teacher's are here, a critic's is in ``value_objective``.

    backend, per micro-batch       here                                      algorithms
      TokenScores ───────────────▶ + columns, advantages, global counts ───▶ loss_fn.kind, checked
      backward ◀───────────────────── loss                                      │
                                   TrainMetrics ◀───────────────────────────────┘
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nemo_like.algorithms.divergence import divergences
from nemo_like.algorithms.logprobs import LogprobSettings, TokenScores
from nemo_like.algorithms.loss_traits import scores_prev_logprobs, trains_on_entropy
from nemo_like.algorithms.losses import GlobalCounts, LossTokens, TokenMean, token_weights
from nemo_like.algorithms.options import LossConfig
from nemo_like.batch.columns import (
    GENERATION_LOGPROBS,
    PREV_LOGPROBS,
    REFERENCE_LOGPROBS,
    Column,
    Layout,
)
from nemo_like.batch.meta import GlobalBatch
from nemo_like.batch.tags import ENTROPY_COEF, LIKELIHOOD_WEIGHT, SAMPLE_MASK
from nemo_like.policy.batch.policy_batch import ModelInputs, PolicyBatch
from nemo_like.policy.batch.policy_columns import training_reads
from nemo_like.policy.loss.checked_loss import CheckedLoss, own_means, own_reads
from nemo_like.policy.loss.token_advantages import TokenAdvantages
from nemo_like.policy.loss.train_metrics import TrainMetrics

# Takes a model's outputs and a micro-batch's inputs; returns its part of the loss, a scalar to differentiate.
# The parts of all micro-batches and ranks are summed, as are their gradients: nothing is averaged over ranks.
LossFunction = Callable[[Any, ModelInputs], Tensor]


class Objective(ABC):
    """Says what the model of a worker group computes for each scored token, and by which loss it trains."""

    __slots__ = ()

    @property
    @abstractmethod
    def scoring(self) -> LogprobSettings | None:
        """How the model scores tokens, as ``TokenScores``. None for a critic, whose model has a value head in
        place of its output layer and returns ``TokenValues``."""

    @property
    def keeps_reference(self) -> bool:
        """Whether the weights at the start are kept as the weights of a reference."""
        return False

    @property
    def further_models(self) -> Sequence[str]:
        """Checkpoints of the same architecture whose weights are kept too, to score with."""
        return ()

    @property
    def is_scored_before(self) -> bool:
        """Whether an earlier phase scores the tokens, under the weights before the first update, for training
        to read."""
        return True

    @property
    def is_token_level(self) -> bool:
        """Whether the loss is a mean over the tokens of an update, and not over its samples."""
        return True

    @property
    def own_means(self) -> Sequence[str]:
        """The names of the means that the loss returns besides ``train_metrics.KNOWN_MEANS``."""
        return ()

    @abstractmethod
    def loss_of_update(self, batch: PolicyBatch, update: GlobalBatch, metrics: TrainMetrics) -> LossFunction:
        """Return the loss function of one optimizer update. The backend calls it once per micro-batch, and
        each call records into ``metrics``."""

    def compares_in(self, metrics: TrainMetrics) -> bool:
        """Return whether the next update of ``metrics`` compares trainer and engine.

        It does so when no earlier phase scored the tokens, and while the weights are still those that
        sampled.
        """
        return not self.is_scored_before and metrics.num_updates == 0

    def share_of(self, update: GlobalBatch) -> float:
        """Return the factor that turns the loss of ``update.unnormalised()`` into the loss of ``update``."""
        return _counts_of(update).share(is_token_level=self.is_token_level)


@dataclass(frozen=True, slots=True)
class PolicyObjective(Objective):
    """The objective of the policy: log-probs of tokens at the sampling ``temperature``, and ``loss_fn``."""

    loss: LossConfig
    temperature: float

    @property
    def scoring(self) -> LogprobSettings:
        return LogprobSettings(temperature=self.temperature, with_entropy=self.loss.entropy_coef is not None)

    @property
    def keeps_reference(self) -> bool:
        return self.loss.reference_policy_kl_penalty > 0

    @property
    def is_scored_before(self) -> bool:
        return scores_prev_logprobs(self.loss)

    @property
    def is_token_level(self) -> bool:
        return self.loss.token_level_loss

    @property
    def own_means(self) -> Sequence[str]:
        return own_means(self.loss)

    def loss_of_update(self, batch: PolicyBatch, update: GlobalBatch, metrics: TrainMetrics) -> LossFunction:
        """Return the function that ``loss_fn.kind`` names, with checks.

        It raises LossFailed when the function raises, or returns anything but well-formed LossTerms.
        """
        cfg = self.loss
        is_accumulated = update == update.unnormalised()
        compute, own = CheckedLoss(cfg, is_accumulated=is_accumulated), own_reads(cfg)
        counts = _counts_of(update)
        advantages = TokenAdvantages(batch, cfg)
        compares_here = self.compares_in(metrics)

        def loss(scores: TokenScores, inputs: ModelInputs) -> Tensor:
            tokens = _loss_tokens(scores, inputs, batch, counts, cfg)
            tokens = replace(tokens, advantages=advantages.at(inputs, tokens.mask))
            columns = {one.name: _own(one, batch, inputs, tokens.mask) for one in own}
            terms = compute(tokens, columns, inputs.rows)
            metrics.add_micro_batch(terms, tokens.mask)
            if compares_here and tokens.generation_logprobs is not None:
                gaps = divergences(tokens.logprobs.detach(), tokens.generation_logprobs)
                metrics.add_means({name: TokenMean(gap, tokens.mask) for name, gap in gaps.items()})
            return terms.loss

        return loss


@dataclass(frozen=True, slots=True)
class TeacherObjective(Objective):
    """The objective of a teacher, which scores with ``settings`` and never trains.

    ``further`` are the checkpoints that it scores by besides its own.
    """

    settings: LogprobSettings
    further: tuple[str, ...] = ()

    @property
    def scoring(self) -> LogprobSettings:
        return self.settings

    @property
    def further_models(self) -> Sequence[str]:
        return self.further

    def loss_of_update(self, batch: PolicyBatch, update: GlobalBatch, metrics: TrainMetrics) -> LossFunction:
        """Raise RuntimeError: a teacher has no loss."""
        raise RuntimeError("a teacher is frozen, so it cannot be asked to train")


def _counts_of(update: GlobalBatch) -> GlobalCounts:
    return GlobalCounts(num_tokens=update.num_tokens, num_samples=update.num_samples)


def _own(column: Column, batch: PolicyBatch, inputs: ModelInputs, mask: Tensor) -> Tensor | list[Any]:
    """Return a column that the loss declares to read, for one micro-batch.

    A tensor per token is 0 on tokens that do not train, where the column itself may hold nan.
    """
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
    """Collect the values of the scored tokens that the loss needs; the advantages are still 0."""
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
        advantages=torch.zeros_like(mask),
        weights=token_weights(sample_index, sample_mask, response_lengths, counts, cfg),
        mask=mask,
        sample_index=sample_index,
        response_lengths=response_lengths,
        reference_logprobs=compared(REFERENCE_LOGPROBS),
        generation_logprobs=generation,
        entropy=scores.entropy,
        entropy_gate=batch.entropy_gate(inputs) if trains_on_entropy(cfg) else None,
        likelihood_weights=mask * batch.sample_values[LIKELIHOOD_WEIGHT.name][inputs.rows][sample_index]
        if cfg.positive_example_nll_weight
        else None,
        entropy_coefs=None
        if cfg.entropy_target is None
        else batch.sample_values[ENTROPY_COEF.name][inputs.rows][sample_index],
        topk_logprobs=scores.topk_logprobs,
    )
