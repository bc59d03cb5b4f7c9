"""The objective of a teacher: log-probs of tokens under a frozen model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from nemo_like.algorithms.logprobs import LogprobSettings
from nemo_like.batch.meta import GlobalBatch
from nemo_like.policy.batch.policy_batch import PolicyBatch
from nemo_like.policy.loss.objective import LossFunction, Objective
from nemo_like.policy.loss.train_metrics import TrainMetrics


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
