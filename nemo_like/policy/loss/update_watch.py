"""Records a training phase's losses and their gradients by log-prob, and compares them with the formulas
afterwards.

    objective, per micro-batch    ──▶ log-probs, positions in the columns, and, by a hook, d loss / d log-prob
    once, after the last update   ──▶ the same from the columns by ``tripwires.reference_loss``; differences
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from nemo_like.algorithms.logprobs import TokenScores
from nemo_like.algorithms.loss_traits import (
    has_reference_loss,
    punishes_messages,
    scores_prev_logprobs,
    trains_on_entropy,
)
from nemo_like.algorithms.options import LossConfig
from nemo_like.batch.columns import (
    GENERATION_LOGPROBS,
    MESSAGE_FLAGS,
    PREV_LOGPROBS,
    REFERENCE_LOGPROBS,
    TOKEN_ADVANTAGES,
    Column,
)
from nemo_like.batch.meta import GlobalBatch
from nemo_like.batch.tags import (
    ADVANTAGE,
    ENTROPY_COEF,
    KL_SCALE,
    LIKELIHOOD_WEIGHT,
    SAMPLE_MASK,
    TOKEN_SCALE,
    Tag,
)
from nemo_like.policy.batch.policy_batch import ModelInputs, PolicyBatch
from nemo_like.policy.loss.objective import LossFunction
from nemo_like.policy.loss.updated_tensors import UpdatedTensor
from nemo_like.tripwires.measured import Measured
from nemo_like.tripwires.reference_loss import (
    ReferenceTerms,
    ScoredTokens,
    entropy_is_possible,
    kl_to_go,
    punished,
    reference_terms,
)


@dataclass(frozen=True, slots=True)
class WeightCopies:
    """Weights by name of which several ranks have equal copies; ``first_rank`` is the lowest of the ranks.

    Every rank gives its weights in as many such sets, in the same order. ``are_computed_apart`` says that
    each rank computes its copy's gradient itself.
    """

    first_rank: int
    weights: Sequence[tuple[str, Tensor]]
    are_computed_apart: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendState:
    """A backend's weights and optimizer state on this rank; of sharded tensors only this rank's parts."""

    weights: Sequence[Tensor]
    first_moments: Sequence[Tensor]  # Adam's; none before the first update
    momenta: Sequence[Tensor] = ()  # Muon's, likewise
    num_updates: int  # as the learning-rate schedule counts them
    optimizer_steps: Sequence[int]  # as the optimizer counts them
    learning_rates: Sequence[float]  # of the optimizer's parameter groups
    weight_decays: Sequence[float]  # likewise
    updated: Sequence[UpdatedTensor] = ()
    copies: Sequence[WeightCopies] = ()


@dataclass(slots=True)
class _MicroBatch:
    """One micro-batch's inputs, scores and loss. ``gradients`` by name are [M]; the backward pass adds
    them."""

    batch: PolicyBatch
    logprobs: Tensor
    entropy: Tensor | None
    inputs: ModelInputs
    update: GlobalBatch
    loss: Tensor
    number: int  # of the update within the phase
    gradients: dict[str, Tensor] = field(default_factory=dict)


class LossWatch(Protocol):
    """Watches the losses of one training phase on one rank."""

    sees_losses: bool

    def watched(
        self, loss: LossFunction, batch: PolicyBatch, update: GlobalBatch, number: int, factor: float = 1.0
    ) -> LossFunction:
        """Return a function like ``loss`` that also records its inputs, results and gradients here."""

    def normalise(self, update: GlobalBatch, share: float) -> None:
        """Count all micro-batches so far as parts of ``update``, with losses multiplied by ``share``."""

    def measured(self) -> dict[Measured, float]:
        """Compare the recorded losses with the formulas; return the differences."""


class TrainingWatch(Protocol):
    """Watches a backend's training phases."""

    @property
    def losses(self) -> LossWatch:
        """The watch on the losses of the present phase, on the ranks that compute them."""

    def seeing_gradients(self, loss: LossFunction, gradients: Callable[[], Sequence[Tensor]]) -> LossFunction:
        """Return a function like ``loss`` that measures the held gradients when it is first called."""

    def seeing_first_layer(self, layer: torch.nn.Module | None) -> AbstractContextManager[None]:
        """Return a context in which the gradient of the output of the model's first layer is measured; None
        where another rank has it."""

    def updating(self, tensors: Callable[[], Sequence[UpdatedTensor]]) -> AbstractContextManager[None]:
        """Return a context for one update, of what ``tensors()`` returns."""

    def begin(self, now: BackendState) -> None:
        """Measure the backend's weights and optimizer before the first update of a phase."""

    def end(self, now: BackendState) -> None:
        """Measure the backend's weights and optimizer after the last update of a phase."""


class UpdateWatch:
    """Watches the losses of one training phase on one rank."""

    def __init__(
        self,
        loss: LossConfig,
        *,
        sees_losses: bool = True,
        vocabulary: int = 2**20,
    ) -> None:
        """Start without losses. Without ``sees_losses`` none are watched. ``vocabulary`` is the number of
        tokens that may be sampled, or more."""
        self.sees_losses, self._vocabulary = sees_losses, vocabulary
        self._cfg = loss
        self._micro_batches: list[_MicroBatch] = []

    def watched(
        self, loss: LossFunction, batch: PolicyBatch, update: GlobalBatch, number: int, factor: float = 1.0
    ) -> LossFunction:
        """Return a function like ``loss`` that also records its inputs and results here, before the backward
        pass.

        ``loss`` is the loss of update ``number``, counted from 0. The backward pass begins with ``factor``
        times its result, and gradients are recorded without the factor.
        """
        if not self.sees_losses:
            return loss

        def watched(scores: TokenScores, inputs: ModelInputs) -> Tensor:
            given = loss(scores, inputs)
            kept = _MicroBatch(
                batch,
                scores.logprobs.detach(),
                None if scores.entropy is None else scores.entropy.detach(),
                inputs,
                update,
                given.detach(),
                number,
            )
            for name, tensor in (("logprobs", scores.logprobs), ("entropy", scores.entropy)):
                if tensor is not None and tensor.requires_grad:
                    tensor.register_hook(_keep_in(kept.gradients, name, factor))
            self._micro_batches.append(kept)
            return given

        return watched

    @torch.no_grad()
    def normalise(self, update: GlobalBatch, share: float) -> None:
        """Count all micro-batches so far as parts of ``update``.

        Their losses and gradients were computed by counts of 1 and multiplied by ``share`` afterwards.
        """
        for one in self._micro_batches:
            one.update, one.loss = update, one.loss * share
            one.gradients = {name: gradient * share for name, gradient in one.gradients.items()}

    @torch.no_grad()
    def measured(self) -> dict[Measured, float]:
        """Compare the recorded losses with the formulas; return the differences. A rank that scored no token
        returns nothing."""
        if not self._micro_batches or not sum(len(one.logprobs) for one in self._micro_batches):
            return {}
        tokens = self._tokens()
        found = {
            Measured.num_trained_tokens: float(tokens.trains.sum()),
            Measured.loss_gradient: _greatest(self._gradient("logprobs").abs()),
        }
        if scores_prev_logprobs(self._cfg):
            is_first = self._spread([one.number == 0 for one in self._micro_batches]).bool() & tokens.trains
            if bool(is_first.any()):
                gap = (tokens.logprobs - tokens.prev)[is_first].abs().mean()
                found[Measured.first_ratio_gap] = _greatest(gap)
        if tokens.entropy is not None:
            is_odd = ~entropy_is_possible(tokens.entropy, tokens.logprobs, self._vocabulary)
            found[Measured.num_odd_entropies] = float((is_odd & tokens.trains).sum())
        if has_reference_loss(self._cfg):
            found |= self._errors(reference_terms(tokens, self._cfg))
        return found

    def _errors(self, expected: ReferenceTerms) -> dict[Measured, float]:
        """Return how far gradients and losses are from the expected ones, relative to the size of their
        terms."""
        difference = (self._gradient("logprobs") - expected.gradient).abs()
        errors = torch.where(expected.is_certain, difference / expected.scale.clamp(min=1e-30), 0.0)
        if any(one.entropy is not None for one in self._micro_batches):
            by_entropy = (self._gradient("entropy") - expected.entropy_gradient).abs()
            errors = torch.maximum(errors, by_entropy / expected.scale.clamp(min=1e-30))
        loss = torch.stack([one.loss for one in self._micro_batches]).double().sum()
        loss_scale = (expected.loss.abs() + expected.scale).sum().clamp(min=1e-30)
        return {
            Measured.loss_gradient_error: _greatest(errors),
            Measured.loss_error: _greatest((loss - expected.loss.sum()).abs() / loss_scale),
        }

    def _tokens(self) -> ScoredTokens:
        """Gather the tokens of all micro-batches with their values from columns and tags."""
        parts = self._micro_batches
        sizes = [len(one.inputs.rows) for one in parts]
        firsts = [sum(sizes[:number]) for number in range(len(sizes))]
        sample = torch.cat(
            [one.inputs.sample_index + first for one, first in zip(parts, firsts, strict=True)]
        )
        logprobs = torch.cat([one.logprobs for one in parts]).double()
        of_samples, trains = self._of_samples(ADVANTAGE)[sample], self._of_samples(SAMPLE_MASK)[sample] > 0
        reference, prev = self._column(REFERENCE_LOGPROBS), self._prev()
        of_tokens, gained = self._column(TOKEN_ADVANTAGES), torch.zeros_like(of_samples)
        if of_tokens is not None:
            gained = self._of_samples(TOKEN_SCALE)[sample] * of_tokens
            gained = gained.masked_fill(~trains, 0.0)
        elif self._cfg.use_kl_in_reward and reference is not None and prev is not None:
            kind = self._cfg.reference_policy_kl_type
            runs, num_runs = self._runs()
            gained = -self._of_samples(KL_SCALE)[sample] * kl_to_go(reference - prev, runs, num_runs, kind)
        advantages, advantage_sizes = self._punished(of_samples + gained, of_samples.abs() + gained.abs())
        return ScoredTokens(
            logprobs=logprobs,
            prev=logprobs if prev is None else prev,
            advantages=advantages,
            advantage_sizes=advantage_sizes,
            trains=trains,
            sample=sample,
            num_samples=sum(sizes),
            update_tokens=self._spread([one.update.num_tokens for one in parts]),
            update_samples=self._spread([one.update.num_samples for one in parts]),
            generation=self._column(GENERATION_LOGPROBS),
            reference=reference,
            gate=torch.cat([one.batch.entropy_gate(one.inputs) for one in parts])
            if trains_on_entropy(self._cfg)
            else None,
            likelihood=self._of_samples(LIKELIHOOD_WEIGHT)[sample]
            if self._cfg.positive_example_nll_weight
            else None,
            entropy_coefs=None
            if self._cfg.entropy_target is None
            else self._of_samples(ENTROPY_COEF)[sample],
            entropy=None
            if parts[0].entropy is None
            else torch.cat([one.entropy for one in parts if one.entropy is not None]).double(),
        )

    def _runs(self) -> tuple[Tensor, int]:
        """Return the number of each token's run, [M] int64, and how many runs there are."""
        numbers, num_runs = [], 0
        for one in self._micro_batches:
            runs = one.batch.runs.of_tokens(one.inputs.packed_index.cpu())
            numbers.append(runs.to(one.logprobs.device) + num_runs)
            num_runs += len(one.batch.runs)
        return torch.cat(numbers), num_runs

    def _punished(self, advantages: Tensor, sizes: Tensor) -> tuple[Tensor, Tensor]:
        """Return the advantages with the penalties of responses of a wrong form, and their sizes."""
        flags = self._column(MESSAGE_FLAGS) if punishes_messages(self._cfg) else None
        return (advantages, sizes) if flags is None else punished(advantages, sizes, flags, self._cfg)

    def _prev(self) -> Tensor | None:
        """Return the log-probs that the ratio compares with; None where the ratio is 1 by definition."""
        if self._cfg.force_on_policy_ratio:
            return None
        column = GENERATION_LOGPROBS if self._cfg.use_generation_logprobs_as_prev else PREV_LOGPROBS
        return self._column(column)

    def _column(self, column: Column) -> Tensor | None:
        """Return a column's values at the tokens, [M] float64; None where a batch does not have it, so the
        loss does not read it."""
        parts = self._micro_batches
        if any(column not in one.batch for one in parts):
            return None
        return torch.cat([one.batch.columns[column.name][one.inputs.packed_index] for one in parts]).double()

    def _of_samples(self, tag: Tag[Any]) -> Tensor:
        """Return a tag's values for the samples of all micro-batches, [samples] float64."""
        parts = self._micro_batches
        return torch.cat([one.batch.sample_values[tag.name][one.inputs.rows] for one in parts]).double()

    def _gradient(self, name: str) -> Tensor:
        return torch.cat(
            [one.gradients.get(name, torch.zeros_like(one.logprobs)) for one in self._micro_batches]
        ).double()

    def _spread(self, values: list[int] | list[bool]) -> Tensor:
        """Return for each token the value of its micro-batch, [M] float64."""
        device = self._micro_batches[0].logprobs.device
        counts = torch.tensor([len(one.logprobs) for one in self._micro_batches], device=device)
        return torch.tensor(values, dtype=torch.float64, device=device).repeat_interleave(counts)


def _keep_in(gradients: dict[str, Tensor], name: str, factor: float) -> object:
    def keep(gradient: Tensor) -> None:
        gradients[name] = gradient.detach() / factor

    return keep


def _greatest(values: Tensor) -> float:
    """Return the greatest value; infinity where one is NaN."""
    return float(values.nan_to_num(nan=torch.inf, posinf=torch.inf).max())
