"""Environments that judge with libraries for a subject: math-verify and reasoning-gym."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache, partial
from typing import Any

from nemo_like.data.interface import TaskPrompt
from nemo_like.data.messages import question_of
from nemo_like.environments.interface import Feedback, Turn
from nemo_like.environments.kind import RecordCheck
from nemo_like.environments.latex_quantities import plain_numbers
from nemo_like.environments.per_turn import PerTurnEnvironment, extract_answer
from nemo_like.environments.record_needs import NUM_PARSED, answer, field_of
from nemo_like.environments.shared_options import MatchOptions

_DEGREE_SIGN = re.compile(r"(?<=\d)\s*°(?!\s*[CF])")


def math_verify(options: MatchOptions) -> PerTurnEnvironment:
    """Make an environment that gives 1 when the response's expression equals the reference answer."""
    return PerTurnEnvironment(partial(_judge_math, options=options))


def reasoning_gym(options: MatchOptions) -> PerTurnEnvironment:
    """Make an environment that gives the score of the reasoning-gym dataset that the prompt came from.

    ``data["metadata"]`` of a prompt is the entry's metadata; ``source_dataset`` in it names the dataset.
    """
    import reasoning_gym  # noqa: F401 - seconds of imports, before the first deadline runs

    return PerTurnEnvironment(partial(_judge_reasoning_gym, options=options))


def _judge_math(turn: Turn, options: MatchOptions) -> Feedback:
    from math_verify import parse, verify

    found = extract_answer(turn.response, options.answer_pattern)
    if found is None:
        return Feedback({"correct": 0.0})
    reference = reference_expression(turn.answer)
    answer = parse(_typeset(found), parsing_timeout=None)
    return Feedback({"correct": float(verify(reference, answer, timeout_seconds=None))})


def reference_expression(reference: str) -> list[Any]:
    """Return the expressions that math-verify finds in a reference answer; raise ValueError when there are
    none."""
    from math_verify import parse

    # No deadline of math-verify's own, which uses signals: the server's deadline bounds every call.
    found = parse(_as_math(reference), parsing_timeout=None)
    if not found:
        raise ValueError(f"math-verify finds no expression in the reference answer {reference!r}")
    return found


def _as_math(reference: str) -> str:
    """Put LaTeX delimiters around a reference without any, since all of it is the expression."""
    reference = _typeset(reference)
    return reference if "$" in reference or "\\boxed" in reference else f"${reference}$"


def _typeset(text: str) -> str:
    """Return a text whose quantities math-verify reads alike. It takes dollar signs as delimiters, and does
    not read ``50\\%`` as ``50%``, ``10\\,000`` as a number, or ``90°`` as an angle."""
    plain = plain_numbers(text.replace("\\$", ""))
    return _DEGREE_SIGN.sub(r"^\\circ", plain)


def _judge_reasoning_gym(turn: Turn, options: MatchOptions) -> Feedback:
    metadata = turn.data["metadata"]
    question = question_of(turn.prompt)
    entry = {"question": question, "answer": turn.answer, "metadata": metadata}
    answer = extract_answer(turn.response, options.answer_pattern)
    return Feedback({"score": float(_scorer(metadata["source_dataset"])(answer, entry))})


@cache
def _scorer(dataset: str) -> Any:
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(dataset)


def has_expression(options: MatchOptions) -> RecordCheck:
    has_answer, num_parsed = answer(options), 0

    def check(task_prompt: TaskPrompt) -> None:
        nonlocal num_parsed
        has_answer(task_prompt)
        if num_parsed < NUM_PARSED:
            num_parsed += 1
            reference_expression(task_prompt.answer)

    return check


def names_dataset(options: MatchOptions) -> RecordCheck:
    def check(task_prompt: TaskPrompt) -> None:
        metadata = field_of(task_prompt, "metadata", "reasoning-gym's own")
        if not isinstance(metadata, Mapping) or "source_dataset" not in metadata:
            raise ValueError("the field 'metadata' does not name its reasoning-gym dataset (source_dataset)")

    return check
