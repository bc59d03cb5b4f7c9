"""Checks of records that several kinds of environments share, so that missing fields are found before a
run."""

from __future__ import annotations

from typing import Any

from nemo_like.data.interface import TaskPrompt
from nemo_like.environments.kind import RecordCheck
from nemo_like.environments.shared_options import EPISODE_KEY

# The most answers or tests that a check parses: each takes milliseconds, and a mistake is usually in all.
NUM_PARSED = 1000


def needs_nothing(task_prompt: TaskPrompt) -> None:
    """Accept every prompt."""


def answer(options: Any) -> RecordCheck:
    def check(task_prompt: TaskPrompt) -> None:
        if not task_prompt.answer.strip():
            raise ValueError("the reference answer is empty")

    return check


def episode(options: Any) -> RecordCheck:
    def check(task_prompt: TaskPrompt) -> None:
        field_of(task_prompt, EPISODE_KEY, "which data.*.kind=environment makes")

    return check


def field_of(task_prompt: TaskPrompt, key: str, meaning: str) -> Any:
    """Return a further field of a record; ``meaning`` explains the field in errors. Raises ValueError when it
    is missing."""
    if key not in task_prompt.data:
        there = ", ".join(map(repr, sorted(task_prompt.data))) or "none besides prompt and answer"
        raise ValueError(f"no field {key!r} ({meaning}), which the environment needs; there are: {there}")
    return task_prompt.data[key]
