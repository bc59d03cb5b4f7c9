"""Errors that end a run with a sentence instead of a traceback."""

from __future__ import annotations

from pathlib import Path

from nemo_like.cluster.actor_errors import ActorFailed
from nemo_like.observability.disk import DiskFull, disk_full, full_directory


class RunFailed(RuntimeError):
    """The run cannot go on; the message says why and what to change."""


class RewardsFailed(RunFailed):
    """An environment could not judge more samples of a step or validation than the configuration allows."""


class CallbackFailed(RunFailed):
    """The function that a program wants called after every step raised; ``__cause__`` is what it raised."""


def failure_reason(error: Exception, run_directory: Path, *others: Path) -> str:
    """Return why a run failed; when a full disk did it, say so, whichever process noticed it first.

    ``others`` are directories besides the run's that it writes.
    """
    cause = error.cause if isinstance(error, ActorFailed) else error
    if isinstance(cause, DiskFull):
        return str(cause)
    directory = full_directory(error, run_directory, *others)
    if directory is not None:
        return f"{disk_full('what the run writes', directory, None)}. It was noticed by: {error}"
    return str(error)
