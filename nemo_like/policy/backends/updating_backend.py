"""How a training backend trains, whatever library computes: the part that all backends share.

    accumulate, per call        gradient and loss by counts of 1: sums over tokens, or over samples
    train, accumulated update   x share of the whole batch's counts ──▶ the gradient and loss of their mean
    train, other updates        gradient and loss by the counts of the update
    either way                  learning rate of the update ──▶ optimizer ──▶ metrics
    in float16                  loss x scale, gradient / scale; no update where that is not finite

A loss is linear in its tokens' weights. So gradients that are accumulated call by call, before the whole
batch is there, make the same update as the whole batch at once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from nemo_like.batch.meta import GlobalBatch, MicroBatch, Schedule
from nemo_like.checkpoint.options import ResumeParts
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.observability.metrics import Metric
from nemo_like.policy.backends.learning_rate import learning_rate
from nemo_like.policy.backends.loss_scaling import LossScaler
from nemo_like.policy.backends.scoring_backend import ScoringBackend
from nemo_like.policy.batch.policy_batch import ModelInputs, PolicyBatch
from nemo_like.policy.loss.objective import LossFunction
from nemo_like.policy.loss.train_metrics import TrainMetrics
from nemo_like.policy.loss.update_watch import BackendState, TrainingWatch
from nemo_like.policy.loss.updated_tensors import UpdatedTensor
from nemo_like.policy.options import TrainedGroupConfig
from nemo_like.policy.workers.saved_digests import state_digests
from nemo_like.policy.workers.stored_weights import vectors


class UpdatingBackend(ScoringBackend):
    """One rank's part of a model that trains; a subclass sets the attributes in its constructor."""

    coordinates: Coordinates
    device: torch.device
    num_updates = 0  # of this run, which the schedule counts
    updates_before = 0  # of another run, whose moments this one began with
    watch: TrainingWatch | None = None
    _training: TrainedGroupConfig
    _scaler: LossScaler | None = None  # of float16
    _accumulated: TrainMetrics | None = None  # metrics of the gradients that are held for the next update

    def accumulate(self, batch: PolicyBatch, schedule: Schedule) -> None:
        """Add the gradient of the loss of all global batches of the schedule, not normalised, to the
        gradients that this rank holds for the first update of the next ``train``."""
        with self._gradients_in_use():
            if self._accumulated is None:
                self._begin_accumulation()
                self._accumulated = self._new_metrics()
            metrics = self._accumulated
            for update in schedule.global_batches:
                loss = self._loss(batch, update.unnormalised(), metrics, self._unit)
                with self._comparing(metrics):
                    self._accumulate_gradients(batch, schedule, update.micro_batches, loss)

    def drop_accumulated(self) -> None:
        """Forget the accumulated gradients."""
        if self._accumulated is not None:
            self._accumulated = None
            self._drop_gradients()

    def train(self, batch: PolicyBatch, schedule: Schedule) -> dict[str, Metric]:
        """Make one optimizer update per global batch of the schedule; return this replica's part of the
        metrics.

        After ``accumulate``, the first global batch must have no micro-batches, and the counts of all
        accumulated samples. Raises RuntimeError when it then has micro-batches, or has none without
        ``accumulate``.
        """
        check_accumulated(schedule, is_held=self._accumulated is not None)
        metrics, self._accumulated = self._accumulated or self._new_metrics(), None
        with self._gradients_in_use(), self._optimizer_in_use():
            if self.watch is not None:
                self.watch.begin(self._backend_state())
            for update in schedule.global_batches:
                self._update(batch, schedule, update, metrics)
            if self.watch is not None:
                self.watch.end(self._backend_state())
        return self._result(metrics)

    def state_digests(self) -> dict[str, int]:
        """Return the digests of this rank's weights and of its optimizer's state, by name."""
        with self._gradients_in_use(), self._optimizer_in_use():
            return state_digests(self._named_parameters(), self._updated_tensors())

    def vectors(self) -> dict[str, Tensor]:
        """Return copies of some of this rank's weights of one dimension, or of its parts of them, by name."""
        with self._gradients_in_use():
            return vectors(self._named_parameters())

    def _update(
        self, batch: PolicyBatch, schedule: Schedule, update: GlobalBatch, metrics: TrainMetrics
    ) -> None:
        """Make one optimizer update, on one global batch, and record it in ``metrics``."""
        if update.micro_batches:
            loss = self._loss(batch, update, metrics)
            seeing: AbstractContextManager[None] = nullcontext()
            if self.watch is not None:
                loss = self.watch.seeing_gradients(loss, self._gradients)
                seeing = self.watch.seeing_first_layer(self._first_layer())
            with seeing, self._comparing(metrics):
                self._compute_gradients(batch, schedule, update.micro_batches, loss)
        else:
            share = self.objective.share_of(update)
            metrics.scale_loss(share)
            if self.watch is not None:
                self.watch.losses.normalise(update, share)
            self._normalise_gradients(share / self._unit)
        if self._scaler is not None and not self._scaler.unscale(self._gradients(), self.device):
            self._clear_gradients()
            metrics.add_skipped_update()
        else:
            self.num_updates += 1
            rate = learning_rate(self.num_updates, self._training.optimizer.lr, self._training.scheduler)
            with nullcontext() if self.watch is None else self.watch.updating(self._updated_tensors):
                grad_norm = self._step(rate)
            metrics.add_update(grad_norm=grad_norm, learning_rate=rate)
        if self._scaler is not None:
            metrics.set_loss_scale(self._scaler.scale, self._scaler.skipped_in_a_row)

    def _loss(
        self, batch: PolicyBatch, update: GlobalBatch, metrics: TrainMetrics, unit: float = 1.0
    ) -> LossFunction:
        """Return the loss function of one update, multiplied by ``unit`` and by the loss's scale; the watch,
        if there is one, records its calls without these factors."""
        loss = self.objective.loss_of_update(batch, update, metrics)
        factor = unit if self._scaler is None else unit * self._scaler.scale
        if self.watch is not None:
            loss = self.watch.losses.watched(loss, batch, update, metrics.num_updates, factor)
        return loss if factor == 1.0 else _multiplied(loss, factor)

    @property
    def _unit(self) -> float:
        """The factor of an accumulated loss. In float16 it makes a sum over tokens about as large as the mean
        of other updates, which have the same scale."""
        if self._scaler is None:
            return 1.0
        cfg = self._training
        return 2.0 ** -(cfg.train_global_batch_size * cfg.max_total_sequence_length).bit_length()

    def _counters(self) -> dict[str, float]:
        """Return the numbers of a checkpoint that are alike on all ranks."""
        of_scaler = self._scaler.state() if self._scaler else {}
        return {"num_updates": self.num_updates, "updates_before": self.updates_before, **of_scaler}

    def _restore_counters(self, counters: Mapping[str, float], parts: ResumeParts) -> None:
        """Go on with the numbers of a checkpoint, or count its updates as those of another run."""
        num_updates, before = int(counters["num_updates"]), int(counters.get("updates_before", 0))
        if parts is ResumeParts.all:
            self.num_updates, self.updates_before = num_updates, before
        else:
            self.num_updates, self.updates_before = 0, num_updates + before
        if self._scaler is not None:
            self._scaler.restore(counters)

    def _new_metrics(self) -> TrainMetrics:
        return TrainMetrics(self.device, self.coordinates.layout.dp, self.objective.own_means)

    def _comparing(self, metrics: TrainMetrics) -> AbstractContextManager[None]:
        return self._comparing_routers() if self.objective.compares_in(metrics) else nullcontext()

    # The parts that differ by library

    @abstractmethod
    def _gradients_in_use(self) -> AbstractContextManager[None]:
        """Return a context in which the model's gradients can be computed; its weights are on the device."""

    @abstractmethod
    def _optimizer_in_use(self) -> AbstractContextManager[None]:
        """Return a context, entered within ``_gradients_in_use``, in which the optimizer can step."""

    @abstractmethod
    def _compute_gradients(
        self, batch: PolicyBatch, schedule: Schedule, specs: Sequence[MicroBatch], loss: LossFunction
    ) -> None:
        """Compute the gradient of the loss of these micro-batches of the schedule, summed over all ranks."""

    @abstractmethod
    def _accumulate_gradients(
        self, batch: PolicyBatch, schedule: Schedule, specs: Sequence[MicroBatch], loss: LossFunction
    ) -> None:
        """Add the gradient of the loss of these micro-batches of the schedule to the held gradients."""

    @abstractmethod
    def _normalise_gradients(self, share: float) -> None:
        """Multiply the held gradients by ``share``, and have them summed over all ranks."""

    @abstractmethod
    def _gradients(self) -> list[Tensor]:
        """Return this rank's parts of the summed gradients, which ``_step`` will read."""

    @abstractmethod
    def _clear_gradients(self) -> None:
        """Forget all gradients, without an update."""

    def _drop_gradients(self) -> None:
        """Forget the held gradients, without an update."""
        self._clear_gradients()

    @abstractmethod
    def _step(self, rate: float) -> float:
        """Clip the gradients and update the weights at the learning rate ``rate``; return the norm of the
        gradient over all ranks before clipping."""

    @abstractmethod
    def _backend_state(self) -> BackendState:
        """Return this rank's weights and optimizer state, which must be in use."""

    @abstractmethod
    def _updated_tensors(self) -> Sequence[UpdatedTensor]:
        """Return what the optimizer of this rank updates, which must be in use."""

    @abstractmethod
    def _first_layer(self) -> torch.nn.Module | None:
        """Return the module that embeds tokens; None where another rank has it."""

    @abstractmethod
    def _named_parameters(self) -> Sequence[tuple[str, Tensor]]:
        """Return this rank's weights, or its parts of them, by name."""

    def _begin_accumulation(self) -> None:
        """Prepare to hold gradients; by default there is nothing to do, since an update leaves no
        gradients."""

    def _comparing_routers(self) -> AbstractContextManager[None]:
        """Return a context in which routers are compared with the engine's choices; by default no router
        replays them."""
        return nullcontext()

    def _result(self, metrics: TrainMetrics) -> dict[str, Metric]:
        """Return this replica's part of the metrics of a training phase; every rank calls it."""
        return metrics.result()


def _multiplied(loss: LossFunction, factor: float) -> LossFunction:
    def multiplied(outputs: Any, inputs: ModelInputs) -> Tensor:
        return loss(outputs, inputs) * factor

    return multiplied


def check_accumulated(schedule: Schedule, *, is_held: bool) -> None:
    """Raise RuntimeError unless the schedule leaves out exactly the accumulated update: its first update has
    no micro-batches if gradients are held (``is_held``), and all other updates have some."""
    is_computed = [bool(update.micro_batches) for update in schedule.global_batches]
    if is_computed[0] is is_held:
        raise RuntimeError(
            "gradients were accumulated for the first update, and the schedule computes it again"
            if is_held
            else "the schedule computes nothing in its first update, and no gradients were accumulated"
        )
    if not all(is_computed[1:]):
        raise RuntimeError("only the first update of a schedule can have been accumulated")
