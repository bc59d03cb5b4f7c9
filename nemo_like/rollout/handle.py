"""The driver's side of ``SyncRolloutActor``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nemo_like.cluster.actors import ActorHandle
from nemo_like.cluster.cluster import Cluster
from nemo_like.data_plane.meta import KVBatchMeta
from nemo_like.observability.summary import SampleAnswer
from nemo_like.rollout.prompts import PromptBatch, RolloutMode, RolloutResult


class RolloutHandle:
    """Calls the rollout actor and waits, watching every process of the run meanwhile."""

    def __init__(self, cluster: Cluster, actor: ActorHandle, *, timeout_s: float) -> None:
        self._cluster, self._actor, self._timeout_s = cluster, actor, timeout_s

    def run(self, prompts: PromptBatch, partition: str) -> RolloutResult:
        """See ``SyncRolloutActor.run``; raises ClusterError when a process dies or the deadline passes."""
        stage = "generation" if prompts.mode is RolloutMode.training else "validation"
        call = self._actor.submit("run", prompts, partition)
        return self._cluster.gather([call], stage=stage, timeout_s=self._timeout_s)[0]

    def discard(self, batches: Sequence[KVBatchMeta]) -> None:
        """Free the bytes of samples that will not train; returns once they are free."""
        self._wait("discard", tuple(batches))

    def dump(self, step: int, ledger: Sequence[KVBatchMeta]) -> None:
        """Write ``rollouts/step_N.jsonl``; see ``SyncRolloutActor.dump``."""
        self._wait("dump", step, tuple(ledger))

    def sample_answers(self) -> list[SampleAnswer]:
        """A few answers of the latest validation."""
        return self._wait("sample_answers")

    def _wait(self, method: str, *args: Any) -> Any:
        call = self._actor.submit(method, *args)
        return self._cluster.gather([call], stage=f"rollout.{method}", timeout_s=self._timeout_s)[0]
