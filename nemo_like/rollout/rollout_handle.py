"""The driver's side of ``SyncRolloutActor``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nemo_like.batch.meta import KVBatchMeta
from nemo_like.cluster.actors import ActorHandle
from nemo_like.cluster.cluster import Cluster
from nemo_like.config.derived import Stage
from nemo_like.data_plane.operations import Operation
from nemo_like.data_plane.spec import DataPlaneSpec
from nemo_like.observability.summary import SampleAnswer
from nemo_like.rollout.prompts import PromptBatch, RolloutMode, RolloutResult

# The rollout actor keeps the same deadlines and can name the samples that are missing: it answers first.
_GRACE_S = 30.0


class RolloutHandle:
    """Calls the rollout actor and waits, watching every process of the run meanwhile."""

    def __init__(
        self,
        cluster: Cluster,
        actor: ActorHandle,
        *,
        deadline_s: Callable[[Stage], float],
        inspect: Callable[[PromptBatch, RolloutResult], None],
    ) -> None:
        """``inspect`` looks at every rollout before the caller gets it, and may raise."""
        self._cluster, self._actor, self._deadline_s = cluster, actor, deadline_s
        self._inspect = inspect

    def run(self, prompts: PromptBatch, partition: str) -> RolloutResult:
        """See ``SyncRolloutActor.run``; raises ClusterError when a process dies or the deadline passes, and
        what ``inspect`` raises."""
        stage = Stage.generation if prompts.mode is RolloutMode.training else Stage.validation
        call = self._actor.submit("run", prompts, partition)
        timeout_s = self._deadline_s(stage) + _GRACE_S
        result = self._cluster.gather([call], stage=stage.name, timeout_s=timeout_s)[0]
        self._inspect(prompts, result)
        return result

    def clear(self, batches: Sequence[KVBatchMeta]) -> Sequence[Operation]:
        """Free the bytes of samples that will not train; returns once they are free, with what that took."""
        return self._wait("clear", tuple(batches))

    def dump(self, step: int, ledger: Sequence[KVBatchMeta]) -> None:
        """Write ``rollouts/step_N.jsonl``; see ``SyncRolloutActor.dump``."""
        self._wait("dump", step, tuple(ledger))

    def sample_answers(self) -> list[SampleAnswer]:
        """A few answers of the latest validation."""
        return self._wait("sample_answers")

    def move_to(self, actor: ActorHandle) -> None:
        """Call another actor from now on."""
        self._actor = actor

    def abandon(self) -> None:
        """Give up a rollout that is under way; returns once it has ended."""
        self._wait_for_actor("abandon")

    def reconnect(
        self,
        engines: Sequence[ActorHandle],
        environments: Mapping[str, Sequence[ActorHandle]],
        data_plane: DataPlaneSpec,
    ) -> None:
        """Let the actor go on with these processes, of which some are new."""
        self._wait_for_actor("reconnect", list(engines), dict(environments), data_plane)

    def _wait(self, method: str, *args: Any) -> Any:
        call = self._actor.submit(method, *args)
        timeout_s = self._deadline_s(Stage.generation)
        return self._cluster.gather([call], stage=f"rollout.{method}", timeout_s=timeout_s)[0]

    def _wait_for_actor(self, method: str, *args: Any) -> None:
        """Whatever becomes of the other processes."""
        self._cluster.gather(
            [self._actor.submit(method, *args)],
            stage=f"rollout.{method}",
            timeout_s=self._deadline_s(Stage.generation),
            watching=[self._actor],
        )
