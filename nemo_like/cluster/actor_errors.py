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
    """A process of the run is gone, or, with a reason, of no more use."""

    def __init__(self, actor: str, stage: str, log_path: str | None, reason: str | None = None) -> None:
        what = "died" if reason is None else "failed"
        super().__init__(
            f"actor {actor!r} {what} during stage {stage!r}{f': {reason}' if reason else ''}; "
            f"its log is {log_path or 'not recorded'}"
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


class RayDied(ClusterError):
    """Ray itself is of no more use, and with it every actor of the run."""

    def __init__(self, reason: str, stage: str) -> None:
        super().__init__(f"{reason} during stage {stage!r}")


class Overdue(RuntimeError):
    """Raised inside an actor whose own deadline passed; ``actors`` names those that it waited for.

    The stage that it belongs to has then missed its deadline too.
    """

    def __init__(self, message: str, actors: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.actors = tuple(actors)

    def __reduce__(self) -> tuple[type[Overdue], tuple[str, tuple[str, ...]]]:
        return type(self), (str(self), self.actors)


class StageTimeout(ClusterError):
    """A stage's deadline passed; names the actors that have not answered.

    ``awaited`` says what they would have brought, ``stacks`` what they are doing.
    """

    def __init__(self, stage: str, what: str, waiting_for: Sequence[str]) -> None:
        super().__init__(f"stage {stage!r} {what}")
        self.stage, self.waiting_for = stage, list(waiting_for)
        self.awaited = self.stacks = ""

    @classmethod
    def of_stage(cls, stage: str, timeout_s: float, waiting_for: Sequence[str]) -> StageTimeout:
        return cls(
            stage,
            f"did not finish within {timeout_s:g} s; still waiting for {', '.join(waiting_for)}. If the work "
            "is that long, raise cluster.stage_timeout_s or the stage's own in cluster.stage_timeouts_s",
            waiting_for,
        )

    @classmethod
    def of_call(cls, call: str, stage: str, cause: Exception) -> StageTimeout:
        """A deadline inside the actor that carries the call out."""
        return cls(stage, f"missed a deadline in {call}: {cause}", getattr(cause, "actors", ()))

    def __str__(self) -> str:
        return "\n".join(part for part in (super().__str__(), self.awaited, self.stacks) if part)
