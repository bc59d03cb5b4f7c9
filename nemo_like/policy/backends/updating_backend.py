"""How a training backend trains, whatever library computes: the part that all backends share.

    accumulate, per part     gradient and loss by counts of 1: sums over tokens, or over samples
    train, what is held      x share of the whole batch's counts ──▶ the gradient and loss of their mean
    train, other updates     gradient and loss by the counts of the update
    either way               learning rate of the update ──▶ optimizer ──▶ metrics

A loss is linear in its tokens' weights, so what is accumulated part by part, before the whole batch is there,
is the update that all parts would make together.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from nemo_like.batch.meta import GlobalBatch, MicroBatch, Schedule
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.observability.metrics import Metric
from nemo_like.policy.backends.learning_rate import learning_rate
from nemo_like.policy.backends.scoring_backend import ScoringBackend
from nemo_like.policy.batch.policy_batch import PolicyBatch
from nemo_like.policy.loss.objective import LossFunction
from nemo_like.policy.loss.train_metrics import TrainMetrics
from nemo_like.policy.loss.update_watch import Internals, TrainingWatch
from nemo_like.policy.options import TrainedGroupConfig


class UpdatingBackend(ScoringBackend):
    """One rank's part of a model, as far as it trains; a subclass sets the attributes in its constructor."""

    coordinates: Coordinates
    device: torch.device
    num_updates = 0
    watch: TrainingWatch | None = None
    _training: TrainedGroupConfig
    _accumulated: TrainMetrics | None = None  # of the gradients that are held for the next update

    def accumulate(self, batch: PolicyBatch, schedule: Schedule) -> None:
        """Add the gradient of the loss of all global batches of the schedule, not normalised, to what this
        rank holds for the first update of the next ``train``."""
        with self._gradients_in_use():
            if self._accumulated is None:
                self._begin_accumulation()
                self._accumulated = self._new_metrics()
            metrics = self._accumulated
            for update in schedule.global_batches:
                loss = self._loss(batch, update.unnormalised(), metrics)
                with self._comparing(metrics):
                    self._accumulate_gradients(batch, schedule, update.micro_batches, loss)

    def drop_accumulated(self) -> None:
        """Forget what was accumulated for the next ``train``."""
        if self._accumulated is not None:
            self._accumulated = None
            self._drop_gradients()

    def train(self, batch: PolicyBatch, schedule: Schedule) -> dict[str, Metric]:
        """Make one optimizer update per global batch of the schedule; return this replica's part of the
        metrics.

        After ``accumulate``, the first global batch has no micro-batches, and the counts of all that was
        accumulated. Raises RuntimeError when it has some then, or has none without it.
        """
        check_accumulated(schedule, is_held=self._accumulated is not None)
        metrics, self._accumulated = self._accumulated or self._new_metrics(), None
        with self._gradients_in_use(), self._optimizer_in_use():
            if self.watch is not None:
                self.watch.begin(self._internals())
            for update in schedule.global_batches:
                self._update(batch, schedule, update, metrics)
            if self.watch is not None:
                self.watch.end(self._internals())
        return self._result(metrics)

    def _update(
        self, batch: PolicyBatch, schedule: Schedule, update: GlobalBatch, metrics: TrainMetrics
    ) -> None:
        """Make one optimizer update, on one global batch, and record it in ``metrics``."""
        if update.micro_batches:
            loss = self._loss(batch, update, metrics)
            with self._comparing(metrics):
                self._compute_gradients(batch, schedule, update.micro_batches, loss)
        else:
            share = self.objective.share_of(update)
            metrics.scale_loss(share)
            if self.watch is not None:
                self.watch.losses.normalise(update, share)
            self._normalise_gradients(share)
        self.num_updates += 1
        rate = learning_rate(self.num_updates, self._training.optimizer.lr, self._training.scheduler)
        metrics.add_update(grad_norm=self._step(rate), learning_rate=rate)

    def _loss(self, batch: PolicyBatch, update: GlobalBatch, metrics: TrainMetrics) -> LossFunction:
        """Return the loss of one update, which is watched where anything watches."""
        loss = self.objective.of_update(batch, update, metrics)
        if self.watch is None:
            return loss
        return self.watch.losses.watched(loss, batch, update, metrics.num_updates)

    def _new_metrics(self) -> TrainMetrics:
        return TrainMetrics(self.device, self.coordinates.layout.dp, self.objective.own_means)

    def _comparing(self, metrics: TrainMetrics) -> AbstractContextManager[None]:
        return self._comparing_routers() if self.objective.compares_in(metrics) else nullcontext()

    # What differs by library

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
        """Add the gradient of the loss of these micro-batches of the schedule to the gradients held."""

    @abstractmethod
    def _normalise_gradients(self, share: float) -> None:
        """Multiply the gradients held by ``share``, and have them summed over all ranks."""

    @abstractmethod
    def _drop_gradients(self) -> None:
        """Forget the gradients held, without an update."""

    @abstractmethod
    def _step(self, rate: float) -> float:
        """Clip the gradients and update the weights by them at the learning rate ``rate``; return the norm of
        the gradient over all ranks before clipping."""

    @abstractmethod
    def _internals(self) -> Internals:
        """Return what this rank holds of weights and optimizer, which must be in use."""

    def _begin_accumulation(self) -> None:
        """Prepare to hold gradients; here none are left over from the update before."""

    def _comparing_routers(self) -> AbstractContextManager[None]:
        """Return a context in which routers are compared with the engine's choices; here none replay them."""
        return nullcontext()

    def _result(self, metrics: TrainMetrics) -> dict[str, Metric]:
        """Return this replica's part of the metrics of a training phase; every rank calls it."""
        return metrics.result()


def check_accumulated(schedule: Schedule, *, is_held: bool) -> None:
    """Raise RuntimeError unless the schedule leaves exactly the accumulated updates without micro-batches:
    the first one where gradients are held, else none."""
    is_computed = [bool(update.micro_batches) for update in schedule.global_batches]
    if is_computed[0] is is_held:
        raise RuntimeError(
            "gradients were accumulated for the first update, and the schedule computes it again"
            if is_held
            else "the schedule computes nothing in its first update, and no gradients were accumulated"
        )
    if not all(is_computed[1:]):
        raise RuntimeError("only the first update of a schedule can have been accumulated")
