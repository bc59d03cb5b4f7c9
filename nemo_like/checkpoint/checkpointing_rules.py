"""Rules on the keys of ``checkpointing``."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.checkpoint.options import CheckpointingConfig
from nemo_like.config.problems import Problem
from nemo_like.config.units import parse_duration_s


def checkpointing_problems(checkpointing: CheckpointingConfig) -> Iterator[Problem]:
    """Yield every problem with ``checkpoint_must_save_by``, the time by which a run must have saved."""
    limit = checkpointing.checkpoint_must_save_by
    if limit is None:
        return
    key = f"checkpointing.checkpoint_must_save_by={limit}"
    try:
        parse_duration_s(limit)
    except ValueError as error:
        yield Problem(key=key, rule=str(error), remedy="for 3 hours 50 minutes write '00:03:50:00'")
    if not checkpointing.enabled:
        yield Problem(key=key, rule="needs checkpointing.enabled=true", remedy="enable it, or set null")
