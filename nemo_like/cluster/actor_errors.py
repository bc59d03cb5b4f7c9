"""Errors of processes and of the calls between them. Each names the actor, the stage and the log to read."""

from __future__ import annotations

from collections.abc import Sequence


class ClusterError(RuntimeError):
    """Base of the errors for which a process, not the algorithm, is to blame."""

    lost_nodes: Sequence[str] = ()  # addresses of the nodes on which every actor of the run is gone

    def __str__(self) -> str:
        lost = f"; every actor on node {', '.join(self.lost_nodes)} is gone" if self.lost_nodes else ""
        return super().__str__() + lost


class ActorDied(ClusterError):
    """A process of the run is gone. With a ``reason`` it may still exist, but is no longer usable."""

    def __init__(self, actor: str, stage: str, log_path: str | None, reason: str | None = None) -> None:
        what = "died" if reason is None else "failed"
        super().__init__(
            f"actor {actor!r} {what} during stage {stage!r}{f': {reason}' if reason else ''}; "
            f"its log is {log_path or 'not recorded'}"
        )
        self.actor, self.stage = actor, stage


class ActorBroken(ActorDied):
    """A process lives, but raised an error of class ``kind`` after which it is no longer usable."""

    def __init__(self, actor: str, stage: str, log_path: str | None, reason: str, kind: str) -> None:
        super().__init__(actor, stage, log_path, reason)
        self.kind = kind


class ActorFailed(ClusterError):
    """A method of an actor raised ``cause``; the message contains that exception's type and text."""

    def __init__(
        self, actor: str, method: str, stage: str, cause: BaseException, log_path: str | None
    ) -> None:
        super().__init__(
            f"{actor}.{method} failed during stage {stage!r}: {type(cause).__name__}: {cause}"
            + (f"\nits log is {log_path}" if log_path else "")
        )
        self.actor, self.method, self.stage, self.cause = actor, method, stage, cause
        self.log_path = log_path


class RayDied(ClusterError):
    """Ray itself has failed, so every actor of the run is no longer usable."""

    def __init__(self, reason: str, stage: str) -> None:
        super().__init__(f"{reason} during stage {stage!r}")


class Overdue(RuntimeError):
    """An actor raises this when a deadline of its own passes; ``actors`` names the actors it waited for.

    The driver then treats the stage as one that missed its deadline, and raises ``StageTimeout``.
    """

    def __init__(self, message: str, actors: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.actors = tuple(actors)

    def __reduce__(self) -> tuple[type[Overdue], tuple[str, tuple[str, ...]]]:
        return type(self), (str(self), self.actors)


class StageTimeout(ClusterError):
    """A stage missed its deadline; ``waiting_for`` names the actors that have not answered.

    ``awaited`` says which results are missing, ``stacks`` what the actors are doing; both may be empty.
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
        """Return the error for a deadline that passed inside the actor which carries out ``call``."""
        return cls(stage, f"missed a deadline in {call}: {cause}", getattr(cause, "actors", ()))

    def __str__(self) -> str:
        return "\n".join(part for part in (super().__str__(), self.awaited, self.stacks) if part)
