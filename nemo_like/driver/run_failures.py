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
    """The ``on_step`` function of the program that started the run raised; ``__cause__`` is its error."""


def failure_reason(error: Exception, run_directory: Path, *others: Path) -> str:
    """Return why a run failed; name a full disk as the reason, whichever process noticed it first.

    ``others`` are directories besides ``run_directory`` that the run writes.
    """
    cause = error.cause if isinstance(error, ActorFailed) else error
    if isinstance(cause, DiskFull):
        return str(cause)
    directory = full_directory(error, run_directory, *others)
    if directory is not None:
        return f"{disk_full('what the run writes', directory, None)}. It was noticed by: {error}"
    return str(error)
