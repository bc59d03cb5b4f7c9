"""What can go wrong between actors, each naming the actor, the stage and what to look at."""

from __future__ import annotations

from collections.abc import Sequence


class ClusterError(RuntimeError):
    """Base of the errors that end a run because of a process, not of the algorithm."""

    lost_nodes: Sequence[str] = ()  # addresses of the nodes on which every actor of the run is gone

    def __str__(self) -> str:
        lost = f"; every actor on node {', '.join(self.lost_nodes)} is gone" if self.lost_nodes else ""
        return super().__str__() + lost


class ActorDied(ClusterError):
    """A process of the run is gone."""

    def __init__(self, actor: str, stage: str, log_path: str | None) -> None:
        super().__init__(
            f"actor {actor!r} died during stage {stage!r}; its log is {log_path or 'not recorded'}"
        )
        self.actor, self.stage = actor, stage


class ActorFailed(ClusterError):
    """A method of an actor raised; the message is the remote exception's."""

    def __init__(
        self, actor: str, method: str, stage: str, cause: BaseException, log_path: str | None
    ) -> None:
        super().__init__(
            f"{actor}.{method} failed during stage {stage!r}: {type(cause).__name__}: {cause}"
            + (f"\nits log is {log_path}" if log_path else "")
        )
        self.actor, self.method, self.stage, self.cause = actor, method, stage, cause


class StageTimeout(ClusterError):
    """A stage's deadline passed; names the actors that have not answered."""

    def __init__(self, stage: str, timeout_s: float, waiting_for: list[str]) -> None:
        super().__init__(
            f"stage {stage!r} did not finish within {timeout_s:g} s; "
            f"still waiting for {', '.join(waiting_for)}. "
            "Raise cluster.stage_timeout_s if the work is that long"
        )
        self.stage, self.waiting_for = stage, waiting_for
