"""Measures for the tripwires which weights, columns, losses and updates one policy worker works with.

Weights are compared by a fixed number of elements of each tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_like.batch.columns import (
    GENERATION_LOGPROBS,
    INPUT_IDS,
    PARENT_GAPS,
    PREV_LOGPROBS,
    REFERENCE_LOGPROBS,
    RESPONSE_MASK,
    Column,
)
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.batch.tags import (
    ADVANTAGE,
    ADVANTAGE_DIGEST,
    NUM_PROMPT_TOKENS,
    NUM_RESPONSE_TOKENS,
    SAMPLE_DIGEST,
)
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.observability.metrics import Metric, maximum, summed
from nemo_like.policy.batch.policy_batch import ModelInputs, PolicyBatch
from nemo_like.policy.loss.objective import LossFunction
from nemo_like.policy.loss.update_watch import BackendState, LossWatch
from nemo_like.policy.loss.updated_tensors import UpdatedTensor
from nemo_like.policy.options import Device, TrainedGroupConfig
from nemo_like.policy.workers.optimizer_watch import OptimizerWatch
from nemo_like.policy.workers.saved_digests import MOMENT
from nemo_like.policy.workers.weight_copies import (
    CopySums,
    copy_sums,
    digest_slots,
    num_unequal,
    unequal_names,
)
from nemo_like.policy.workers.weight_samples import weight_sample
from nemo_like.tripwires.advantage_digests import advantage_digests
from nemo_like.tripwires.measured import Measured, is_due
from nemo_like.tripwires.options import Tripwires
from nemo_like.tripwires.sample_checks import SampleTags, num_wrong_samples, sample_digests

# Policy and reference count as having different weights when this share of the compared elements differs.
_DIFFERING_SHARE = 0.01
# The numbers that every rank measures, in the order in which ranks exchange them.
_EXCHANGED = (
    Measured.num_wrong_samples,
    Measured.has_policy_as_reference,
    Measured.reference_gap,
    Measured.loss_gradient_error,
    Measured.loss_error,
    Measured.first_ratio_gap,
    Measured.num_updates,
    Measured.optimizer_step_gap,
    Measured.learning_rate,
    Measured.learning_rate_spread,
    Measured.weight_decay,
    Measured.moment_excess,
    Measured.weights_moved,
    Measured.largest_weight,
    Measured.weights_moved_elsewhere,
    Measured.reference_moved,
    Measured.num_wrong_advantages,
    Measured.num_odd_entropies,
    Measured.loss_gradient,
    Measured.held_gradient,
    Measured.num_first_layers,
    Measured.first_layer_gradient,
    Measured.update_excess,
    Measured.num_wrong_updates,
    Measured.num_still_tensors,
    Measured.betas_gap,
    Measured.eps_gap,
    Measured.weight_decay_gap,
    Measured.num_unlike_saved,
    Measured.num_unlike_moments,
    Measured.advantage_error,
    Measured.return_error,
    Measured.first_value_gap,
)
# Of these, a rank with a number above 0 knows the names of tensors.
_NAMED = (
    Measured.num_wrong_updates,
    Measured.num_still_tensors,
    Measured.num_unlike_saved,
    Measured.num_unlike_moments,
)
_MOST_NAMES = 8


class WorkerWatch:
    """Measures one worker's phases. Every worker of the world makes the same calls."""

    def __init__(
        self,
        cfg: TrainedGroupConfig,
        new_losses: Callable[[bool], LossWatch],
        coordinates: Coordinates,
        reference: Callable[[], Sequence[Tensor]],
        tripwires: Tripwires,
    ) -> None:
        """Record the reference's weights at the start of the process, before a checkpoint is loaded.

        ``new_losses(sees_losses)`` returns a watch on the losses of a phase. ``reference()`` returns this
        rank's part of the reference's weights, nothing where no reference is kept. ``tripwires`` decides in
        which training phases losses and updates are compared with their formulas.
        """
        self._cfg, self._new_losses, self._coordinates = cfg, new_losses, coordinates
        self._optimizer = OptimizerWatch(cfg)
        self._copies: Sequence[CopySums] = ()
        self._batches: list[tuple[KVBatchMeta, PolicyBatch]] = []  # of the phase that has begun
        self._is_first_update = True  # whether the phase has made no update yet
        self._reference, self._first_reference = reference, weight_sample(reference())
        self._reference_before = self._first_reference
        self._weights: Tensor | None = None  # as the latest training phase left them
        self._is_reference = True  # whether the policy's weights are still those of the start
        self._found: dict[Measured, float] = {}
        self._mean_norms: list[float] = []  # of Adam's first moments and of Muon's momenta
        self._num_updates = 0
        self._tripwires, self._num_phases = tripwires, 0
        self._losses: LossWatch | None = None  # of the training phase that has begun

    def renew_reference(self) -> None:
        """Record the reference's weights anew, since other ones were meant to take their place."""
        self._reference_before = weight_sample(self._reference())

    def reference_has_come(self, *, is_new: bool) -> None:
        """Expect the reference that a checkpoint brought, if ``is_new``, or else that of the start."""
        self._reference_before = weight_sample(self._reference()) if is_new else self._first_reference

    def forget_weights(self) -> None:
        """Forget the weights that training left, since other weights were loaded."""
        self._weights, self._is_reference = None, False

    def abandon(self) -> None:
        """Forget the measurements of a step that is abandoned."""
        self._found, self._batches, self._optimizer.named = {}, [], []
        if self._losses is not None:
            self._losses, self._num_phases = None, self._num_phases - 1

    def scored(self, logprobs: Mapping[Column, Tensor], batch: PolicyBatch) -> None:
        """Check in a log-prob phase that a reference with other weights gives other log-probs, and measure
        how far its log-probs are from the policy's while both have the same weights.

        The policy's weights are known after the first training phase of this process.
        """
        prev, reference = logprobs.get(PREV_LOGPROBS), logprobs.get(REFERENCE_LOGPROBS)
        if prev is None or reference is None:
            return
        mask = batch.columns[RESPONSE_MASK.name].bool()
        if self._is_reference and mask.any():
            self._note(Measured.reference_gap, float((prev - reference)[mask].abs().mean()))
        start, now = self._reference_before, self._weights
        if now is None or not len(start):
            return
        has_other_weights = float((now != start).float().mean()) >= _DIFFERING_SHARE
        is_equal = torch.equal(prev[mask], reference[mask])
        self._note(Measured.has_policy_as_reference, has_other_weights and is_equal)

    def training(self, meta: KVBatchMeta, batch: PolicyBatch) -> None:
        """Measure the samples that will train, and whether the reference's weights have changed.

        A training phase begins with the first call and lasts until ``trained``. Batches that are accumulated
        one after the other, and the batch that then trains, belong to one phase.
        """
        self._note(Measured.num_wrong_samples, _num_wrong(meta, batch))
        moved = not torch.equal(weight_sample(self._reference()), self._reference_before)
        self._note(Measured.reference_moved, moved)
        if self._losses is None:
            self._num_phases += 1
            sees_losses = is_due(self._num_phases, self._tripwires)
            self._losses, self._is_first_update = self._new_losses(sees_losses), True
        if self._losses.sees_losses:
            self._batches.append((meta, batch))

    @property
    def losses(self) -> LossWatch:
        """The watch on the losses of the training phase that has begun."""
        assert self._losses is not None, "`training` comes first"
        return self._losses

    def seeing_gradients(self, loss: LossFunction, gradients: Callable[[], Sequence[Tensor]]) -> LossFunction:
        """Return a function like ``loss`` that measures, when it is first called, the gradients that are held
        then: before the first backward pass of an update."""
        if not self.losses.sees_losses:
            return loss
        has_seen = False

        def seeing(outputs: Any, inputs: ModelInputs) -> Tensor:
            nonlocal has_seen
            if not has_seen:
                self._note(Measured.held_gradient, _norm(gradients()))
            has_seen = True
            return loss(outputs, inputs)

        return seeing

    @contextmanager
    def seeing_first_layer(self, layer: torch.nn.Module | None) -> Iterator[None]:
        """Measure within the block the gradient of the output of the model's first layer, which all other
        layers pass back to it; ``layer`` is None where another rank has it."""
        if layer is None or not self.losses.sees_losses:
            yield
            return

        def passed(_module: torch.nn.Module, _given: Any, output: Tensor) -> None:
            if output.requires_grad:
                self._note(Measured.num_first_layers, 1.0)
                output.register_hook(keep)

        def keep(gradient: Tensor) -> None:
            self._note(
                Measured.first_layer_gradient, float(gradient.abs().max()) if gradient.numel() else 0.0
            )

        handle = layer.register_forward_hook(passed)
        try:
            yield
        finally:
            handle.remove()

    @contextmanager
    def updating(self, tensors: Callable[[], Sequence[UpdatedTensor]]) -> Iterator[None]:
        """Compare the update within the block with its formula, if it is the first of a phase whose losses
        are watched; ``tensors()`` returns what the optimizer updates."""
        is_watched, self._is_first_update = self._is_first_update and self.losses.sees_losses, False
        if is_watched:
            self._optimizer.before_update(tensors())
        yield
        if is_watched:
            self._found |= self._optimizer.after_update(tensors())

    def trained(self) -> tuple[dict[str, Metric], tuple[str, ...]]:
        """End the training phase: return the numbers that all ranks measured in it, the replica's count of
        tokens, and the names of tensors that are not as they should be."""
        losses = self.losses
        for meta, batch in self._batches:
            self._note(Measured.num_wrong_advantages, _num_wrong_advantages(meta, batch))
        found = self._found | losses.measured()
        self._found, self._losses, self._batches = {}, None, []
        # Tokens are counted where losses are computed, and the leader may be on another pipeline stage.
        own, num_replicas = self._coordinates.dp, self._coordinates.layout.dp
        num_tokens = found.get(Measured.num_trained_tokens, 0.0)
        counts = [num_tokens if replica == own else 0.0 for replica in range(num_replicas)]
        slots = digest_slots(self._copies, self._coordinates.layout.world_size)
        everywhere = _greatest_of_all([*(found.get(name, 0.0) for name in _EXCHANGED), *counts, *slots])
        measured: dict[str, Metric] = {
            name: maximum(value) for name, value in zip(_EXCHANGED, everywhere, strict=False)
        }
        if losses.sees_losses:
            measured[Measured.num_trained_tokens] = summed(everywhere[len(_EXCHANGED) + own])
        unequal = num_unequal(everywhere[len(_EXCHANGED) + num_replicas :])
        measured[Measured.num_unequal_copies] = maximum(unequal)
        return measured, self._names(measured)

    def _names(self, measured: Mapping[str, Metric]) -> tuple[str, ...]:
        """Return the names of the tensors that any rank found wrong; every rank has the same ``measured``, so
        all exchange names, or none does."""
        named, self._optimizer.named = self._optimizer.named, []
        copies, self._copies = self._copies, ()
        if not any(measured[name].value for name in (*_NAMED, Measured.num_unequal_copies)):
            return ()
        names = {*named}
        if dist.is_initialized() and dist.get_world_size() > 1:
            everyone = [named] * dist.get_world_size()
            dist.all_gather_object(everyone, named)
            names = {name for of_rank in everyone for name in of_rank}
            if measured[Measured.num_unequal_copies].value:
                names |= unequal_names(copies)
        return tuple(sorted(names)[:_MOST_NAMES])

    def compare_saved(self, saved: Mapping[str, int], now: Mapping[str, int]) -> None:
        """Count the weights and moments that are not those with which a checkpoint was saved, by the digests
        of both.

        Experts in one matrix product have other names than experts one by one, and an optimizer on the host
        names no moments: only what both name is compared.
        """
        wrong = [name for name in saved.keys() & now.keys() if saved[name] != now[name]]
        moments = [name for name in wrong if name.startswith(MOMENT)]
        self._optimizer.named += [f"{name} (restored)" for name in sorted(wrong)]
        self._note(Measured.num_unlike_moments, len(moments))
        self._note(Measured.num_unlike_saved, len(wrong) - len(moments))

    def begin(self, now: BackendState) -> None:
        """Measure the backend's weights and optimizer before the first update of a phase."""
        before = weight_sample(now.weights)
        if self._weights is not None:
            self._found[Measured.weights_moved_elsewhere] = float(not torch.equal(before, self._weights))
        self._weights, self._num_updates, self._is_reference = before, now.num_updates, False
        self._mean_norms = _mean_norms(now)

    def end(self, now: BackendState) -> None:
        """Measure the backend's weights and optimizer after the last update of a phase."""
        after, before = weight_sample(now.weights), self._weights
        assert before is not None, "`begin` comes first"
        self._weights = after
        self._found |= {
            Measured.num_updates: float(now.num_updates),
            Measured.optimizer_step_gap: float(
                max((abs(steps - now.num_updates) for steps in now.optimizer_steps), default=0)
            ),
            Measured.learning_rate: max(now.learning_rates),
            Measured.learning_rate_spread: max(now.learning_rates) - min(now.learning_rates),
            Measured.weight_decay: max(now.weight_decays),
            Measured.moment_excess: self._moment_excess(now),
            **self._optimizer.settings(now.updated),
            Measured.weights_moved: _largest(after - before),
            Measured.largest_weight: _largest(after),
        }
        if self.losses.sees_losses:
            self._found |= self._optimizer.still(now.updated)
            # Kernels of a GPU may round a gradient differently in each copy that computes it itself.
            is_exact = self._cfg.device is Device.cpu
            self._copies = copy_sums([one for one in now.copies if is_exact or not one.are_computed_apart])

    def note(self, found: Mapping[Measured, float]) -> None:
        """Keep what was measured in a step outside of its training phase."""
        for name, value in found.items():
            self._note(name, value)

    def _moment_excess(self, now: BackendState) -> float:
        """Return by how much a mean of gradients is longer than it can be since the phase began."""
        cfg, excess = self._cfg.optimizer, 0.0
        decays = (cfg.adam_beta1, cfg.muon_momentum)
        for decay, before, norm in zip(decays, self._mean_norms, _mean_norms(now), strict=True):
            kept = decay ** (now.num_updates - self._num_updates)
            # A mean of gradients, each at most max_grad_norm long, and of what was there before.
            excess = max(excess, norm - (kept * before + (1 - kept) * self._cfg.max_grad_norm))
        return excess

    def _note(self, name: Measured, value: float) -> None:
        """Keep the greatest ``value`` that was measured under ``name`` in this step."""
        self._found[name] = max(self._found.get(name, 0.0), float(value))


def _num_wrong(meta: KVBatchMeta, batch: PolicyBatch) -> int:
    if not (len(meta) and meta.has_tag(NUM_PROMPT_TOKENS) and meta.has_tag(NUM_RESPONSE_TOKENS)):
        return 0
    tags = SampleTags(
        lengths=meta.lengths,
        num_prompt_tokens=meta.tag(NUM_PROMPT_TOKENS),
        num_response_tokens=meta.tag(NUM_RESPONSE_TOKENS),
        digests=meta.tag(SAMPLE_DIGEST) if meta.has_tag(SAMPLE_DIGEST) else None,
        are_sessions=PARENT_GAPS in batch,
    )
    columns = batch.columns
    generation = columns[GENERATION_LOGPROBS.name].cpu().numpy() if GENERATION_LOGPROBS in batch else None
    return num_wrong_samples(
        tags, columns[INPUT_IDS.name].numpy(), columns[RESPONSE_MASK.name].numpy(), generation
    )


def _mean_norms(state: BackendState) -> list[float]:
    """Return how long the optimizer's means of gradients are: Adam's first moments, and Muon's momenta."""
    return [_norm(state.first_moments), _norm(state.momenta)]


def _num_wrong_advantages(meta: KVBatchMeta, batch: PolicyBatch) -> int:
    """Return how many samples have another advantage for the loss than the driver estimated for their
    tokens."""
    if not (len(meta) and meta.has_tag(ADVANTAGE_DIGEST) and ADVANTAGE.name in batch.sample_values):
        return 0
    samples = sample_digests(batch.columns[INPUT_IDS.name].numpy(), meta.lengths)
    given = advantage_digests(samples, batch.sample_values[ADVANTAGE.name].tolist())
    return sum(one != other for one, other in zip(given, meta.tag(ADVANTAGE_DIGEST), strict=True))


def _norm(tensors: Sequence[Tensor]) -> float:
    return float(torch.nn.utils.get_total_norm(list(tensors))) if tensors else 0.0


def _largest(values: Tensor) -> float:
    return float(values.abs().max()) if len(values) else 0.0


def _greatest_of_all(values: list[float]) -> list[float]:
    """Return the greatest of each value over all ranks of the world; infinity where a rank has NaN."""
    everywhere = torch.tensor(values, dtype=torch.float64).nan_to_num(nan=torch.inf)
    if dist.is_initialized() and dist.get_world_size() > 1:
        if dist.get_backend() != "gloo":
            everywhere = everywhere.to(torch.device("cuda", torch.cuda.current_device()))
        dist.all_reduce(everywhere, dist.ReduceOp.MAX)
    found: list[float] = everywhere.tolist()
    return found
