"""The config groups that rollouts read."""

from __future__ import annotations

from typing import Protocol

from nemo_like.algorithms.options import GRPOConfig
from nemo_like.cluster.options import ClusterConfig
from nemo_like.driver.options import EvaluationConfig
from nemo_like.observability.options import LoggerConfig
from nemo_like.policy.options import TeacherConfig
from nemo_like.rollout.options import RolloutConfig
from nemo_like.rollout.tasks import TaskConfigGroups
from nemo_like.tripwires.options import DebugConfig


class RolloutConfigGroups(TaskConfigGroups, Protocol):
    """The config groups that ``SyncRolloutActor`` reads."""

    @property
    def grpo(self) -> GRPOConfig: ...
    @property
    def rollout(self) -> RolloutConfig: ...
    @property
    def logger(self) -> LoggerConfig: ...
    @property
    def cluster(self) -> ClusterConfig: ...
    @property
    def debug(self) -> DebugConfig: ...
    @property
    def teacher(self) -> TeacherConfig | None: ...
    @property
    def evaluation(self) -> EvaluationConfig | None: ...
