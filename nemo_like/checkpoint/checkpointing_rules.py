"""Rules on the keys of ``checkpointing``."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.checkpoint.options import CheckpointingConfig, ResumeParts
from nemo_like.config.problems import Problem
from nemo_like.config.units import parse_duration_s


def checkpointing_problems(checkpointing: CheckpointingConfig) -> Iterator[Problem]:
    """Yield every problem with the parts of another run's checkpoint, and with ``checkpoint_must_save_by``,
    the time by which a run must have saved."""
    parts, limit = checkpointing.resume_parts, checkpointing.checkpoint_must_save_by
    if parts is not ResumeParts.all and checkpointing.resume_from_path is None:
        yield Problem(
            key=f"checkpointing.resume_parts={parts.name}",
            rule="says what is taken of checkpointing.resume_from_path, which is null",
            remedy="name the other run's checkpoint there, or set resume_parts=all",
        )
    if limit is None:
        return
    key = f"checkpointing.checkpoint_must_save_by={limit}"
    try:
        parse_duration_s(limit)
    except ValueError as error:
        yield Problem(key=key, rule=str(error), remedy="for 3 hours 50 minutes write '00:03:50:00'")
    if not checkpointing.enabled:
        yield Problem(key=key, rule="needs checkpointing.enabled=true", remedy="enable it, or set null")
