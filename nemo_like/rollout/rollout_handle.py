"""The driver's side of the rollout actor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from nemo_like.batch.meta import KVBatchMeta
from nemo_like.cluster.actors import ActorHandle, Call
from nemo_like.cluster.cluster import Cluster
from nemo_like.cluster.stage import Stage
from nemo_like.data_plane.operations import Operation
from nemo_like.data_plane.spec import DataPlaneSpec
from nemo_like.observability.summary import SampleAnswer
from nemo_like.rollout.prompts import PromptBatch, RolloutResult, WantedGroups

# The rollout actor keeps the same deadlines and can name the samples that are missing; the driver waits this
# much longer, so that the actor answers first.
_GRACE_S = 30.0


class RolloutHandle:
    """Calls the rollout actor and waits for its answers.

    The death of any process of the run ends a wait with an error, except in ``abandon`` and ``reconnect``.
    """

    def __init__(
        self,
        cluster: Cluster,
        actor: ActorHandle,
        *,
        deadline_s: Callable[[Stage], float],
        inspect: Callable[[PromptBatch, RolloutResult], None],
    ) -> None:
        """Call ``actor`` with deadlines from ``deadline_s``. ``inspect`` checks every part of a rollout
        before ``next_part`` returns it, and may raise."""
        self._cluster, self._actor, self._deadline_s = cluster, actor, deadline_s
        self._inspect = inspect
        self._begun: dict[str, Call] = {}  # by the rollouts' names; nobody has waited for these calls yet

    def run(self, prompts: PromptBatch, partition: str) -> RolloutResult:
        """Have the actor roll out these prompts, and wait for all samples; raises what ``next_part``
        raises."""
        self.begin(prompts, partition)
        return self.next_part(prompts, WantedGroups(len(prompts)))

    def begin(self, prompts: PromptBatch, partition: str) -> None:
        """Have the actor begin the rollout of these prompts, without waiting; see
        ``SyncRolloutActor.begin``."""
        self._begun[prompts.name] = self._actor.submit("begin", prompts, partition)

    def begin_step(self, step: int) -> None:
        """Let samples go on that had to wait for this step; see ``SyncRolloutActor.begin_step``."""
        self._wait("begin_step", step)

    def next_part(self, prompts: PromptBatch, wanted: WantedGroups) -> RolloutResult:
        """Wait for the next groups of a rollout; see ``SyncRolloutActor.next_part``.

        Raises ClusterError when a process dies or the deadline passes, and what ``inspect`` raises.
        """
        stage = prompts.mode.stage
        timeout_s = self._deadline_s(stage) + _GRACE_S
        if begun := self._begun.pop(prompts.name, None):  # calls may overtake each other
            self._cluster.gather([begun], stage=stage.name, timeout_s=timeout_s)
        call = self._actor.submit("next_part", prompts, wanted)
        result = self._cluster.gather([call], stage=stage.name, timeout_s=timeout_s)[0]
        self._inspect(prompts, result)
        return result

    def clear(self, batches: Sequence[KVBatchMeta]) -> Sequence[Operation]:
        """Clear samples that will not train, wait, and return the data-plane operations that this took."""
        return self._wait("clear", tuple(batches))

    def dump(self, step: int, ledger: Sequence[KVBatchMeta]) -> None:
        """Write ``rollouts/step_N.jsonl``; see ``SyncRolloutActor.dump``."""
        self._wait("dump", step, tuple(ledger))

    def sample_answers(self) -> list[SampleAnswer]:
        """Return a few answers of the latest validation, as text."""
        return self._wait("sample_answers")

    def move_to(self, actor: ActorHandle) -> None:
        """Call another actor from now on; forget the rollouts that the previous actor had begun."""
        self._begun.clear()
        self._actor = actor

    def abandon(self) -> None:
        """Abandon the rollouts that are under way; return once they have ended."""
        self._begun.clear()
        self._wait_for_actor("abandon")

    def reconnect(
        self,
        engines: Sequence[ActorHandle],
        environments: Mapping[str, Sequence[ActorHandle]],
        data_plane: DataPlaneSpec,
    ) -> None:
        """Have the actor use these processes from now on; some may be new."""
        self._wait_for_actor("reconnect", list(engines), dict(environments), data_plane)

    def _wait(self, method: str, *args: Any) -> Any:
        call = self._actor.submit(method, *args)
        timeout_s = self._deadline_s(Stage.generation)
        return self._cluster.gather([call], stage=f"rollout.{method}", timeout_s=timeout_s)[0]

    def _wait_for_actor(self, method: str, *args: Any) -> None:
        """Call the actor and wait for it, whether or not other processes live."""
        self._cluster.gather(
            [self._actor.submit(method, *args)],
            stage=f"rollout.{method}",
            timeout_s=self._deadline_s(Stage.generation),
            watching=[self._actor],
        )
