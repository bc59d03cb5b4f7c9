"""Checks of records that several kinds of environments share, so that missing fields are found before a
run."""

from __future__ import annotations

from typing import Any

from nemo_like.data.interface import PromptExample
from nemo_like.environments.kind import RecordCheck
from nemo_like.environments.shared_options import EPISODE_KEY

# The most answers or tests that a check parses: each takes milliseconds, and a mistake is usually in all.
NUM_PARSED = 1000


def needs_nothing(example: PromptExample) -> None:
    """Accept every prompt."""


def answer(options: Any) -> RecordCheck:
    def check(example: PromptExample) -> None:
        if not example.answer.strip():
            raise ValueError("the reference answer is empty")

    return check


def episode(options: Any) -> RecordCheck:
    def check(example: PromptExample) -> None:
        field_of(example, EPISODE_KEY, "which data.*.kind=environment makes")

    return check


def field_of(example: PromptExample, key: str, meaning: str) -> Any:
    """Return a further field of a record; ``meaning`` explains the field in errors. Raises ValueError when it
    is missing."""
    if key not in example.data:
        there = ", ".join(map(repr, sorted(example.data))) or "none besides prompt and answer"
        raise ValueError(f"no field {key!r} ({meaning}), which the environment needs; there are: {there}")
    return example.data[key]
