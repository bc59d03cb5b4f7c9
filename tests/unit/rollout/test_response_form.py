"""What is wrong with the form of a response, from its text."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from nemo_like.algorithms.message_flags import NO_FLAG, MessageFlag
from nemo_like.rollout.response_form import ResponseForm
from tests.unit.algorithms.loss_cases import CONFIG

CALL, THOUGHT = MessageFlag.invalid_tool_call, MessageFlag.malformed_thinking
EMPTY, REPEATED = MessageFlag.empty_answer, MessageFlag.repeated_thinking
FORM = ResponseForm(
    CALL | THOUGHT | EMPTY | REPEATED, NO_FLAG, ["<tool_call>", "</tool_call>"], ["<think>", "</think>"]
)
PATTERN = re.compile("<tool_call>\\s*(\\{.*?\\})\\s*</tool_call>", re.DOTALL)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("7", NO_FLAG),
        ("<think>3 + 4</think>7", NO_FLAG),
        (" \n<think>\n3 + 4</think> 7", NO_FLAG),
        ("3 + 4</think>7", NO_FLAG),  # the template began the thought
        ("7 <think>3 + 4</think>", THOUGHT),
        ("<think>3</think><think>4</think>7", THOUGHT),
        ("<think>3<think>4</think>7", THOUGHT),
        ("<think>3</think>4</think>7", THOUGHT),
        ("</think><think>7", THOUGHT),
        ("<think>3 + 4", THOUGHT),
        ("", EMPTY),
        ("<think>7</think> \n", EMPTY),
        ("<think>7 </think> 7\n", REPEATED),
        ('<tool_call>{"name": "add"}</tool_call>', NO_FLAG),
        ('<think>Add.</think><tool_call>{"name": "add", "arguments": {"x": 1}}</tool_call>', NO_FLAG),
        ("<tool_call>{name: add}</tool_call>", CALL),
        ('<tool_call>{"name": "add"}</tool_call><tool_call>{"name": 1}</tool_call>', CALL),
        ('<tool_call>{"name": "add"}', CALL),
        ("<tool_call><think>", CALL | THOUGHT),
    ],
)
def test_marks_that_make_no_thought_and_no_call_are_found(text: str, expected: MessageFlag) -> None:
    assert FORM.of_text(text, PATTERN, is_truncated=False) == expected


def test_a_thought_that_was_cut_short_is_not_malformed() -> None:
    assert FORM.of_text("<think>3 + 4", None, is_truncated=True) == NO_FLAG
    assert FORM.of_text("<think>3<think>4", None, is_truncated=True) == THOUGHT


def test_without_a_pattern_every_mark_of_a_call_is_one_too_many() -> None:
    assert FORM.of_text('<tool_call>{"name": "add"}</tool_call>', None, is_truncated=False) == CALL


def test_a_response_that_calls_a_tool_is_not_empty() -> None:
    assert FORM.of_parts("<think>Add.</think>", "", num_calls=1, is_truncated=False) == NO_FLAG
    assert FORM.of_parts("<think>Add.</think>", "", num_calls=0, is_truncated=False) == EMPTY


def test_a_run_looks_for_what_its_keys_punish(rollout: Any) -> None:
    assert ResponseForm.of(CONFIG, rollout([])) is None
    punished = replace(CONFIG, malformed_thinking_advantage=-5.0)
    form = ResponseForm.of(punished, rollout(["empty_answer"]))
    assert form is not None
    assert (form.watched, form.unrewarded) == (CALL | THOUGHT | EMPTY, EMPTY)
    assert form.of_text("<think>7</think>7<think>", None, is_truncated=False) == THOUGHT
    assert form.of_text("<think>7</think>7", None, is_truncated=False) == NO_FLAG


@pytest.fixture
def rollout() -> Any:
    """``rollout(names)``: the section of that name, with no_reward_for of these."""

    class Rollout:
        tool_call_marks, thinking_marks = FORM.call_marks, FORM.thought_marks

    def made(names: list[str]) -> Any:
        Rollout.no_reward_for = names  # type: ignore[attr-defined]
        return Rollout

    return made
