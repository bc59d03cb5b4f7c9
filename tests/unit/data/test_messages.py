from __future__ import annotations

import json
from typing import Any

import pytest

from nemo_like.data.interface import Message
from nemo_like.data.messages import (
    MAX_LEVELS,
    BadMessage,
    as_openai,
    as_record,
    as_text,
    conversation_of,
    is_shallow,
    message_of,
    plain_call,
    question_of,
    with_response,
    without_missing_arguments,
)

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}


def test_a_message_keeps_every_field_as_the_record_has_it() -> None:
    record = {
        "role": "assistant",
        "content": "Wait.",
        "tool_calls": [CALL],
        "reasoning_content": "?",
        "own": 1,
    }
    message = message_of(record)
    assert message == Message(
        "assistant", "Wait.", {"tool_calls": [CALL], "reasoning_content": "?", "own": 1}
    )
    assert as_record((message,)) == [record]
    assert hash(message) == hash(message_of(dict(reversed(record.items()))))


def test_null_is_as_a_field_that_is_not_there_and_content_may_be_beside_calls() -> None:
    table = {"role": "user", "content": "1", "tool_calls": None, "name": None}
    assert message_of(table) == Message("user", "1")
    assert message_of({"role": "assistant", "content": None, "tool_calls": [CALL]}).content == ""
    assert message_of({"role": "assistant", "tool_calls": [CALL]}).content == ""
    assert message_of({"role": "user", "content": "1", "tool_calls": []}) == Message("user", "1")


@pytest.mark.parametrize(
    ("message", "named"),
    [
        ("hello", "'hello' is no message"),
        ({"from": "human", "value": "1"}, "its role is None"),
        ({"role": "user", "content": None}, "its content None"),
        ({"role": "user", "content": 1}, "its content 1"),
        ({"role": "assistant", "content": None, "function_call": {"name": "add"}}, "its content None"),
        ({"role": "assistant", "content": "", "function_call": {"name": "add"}}, "write tool_calls"),
        ({"role": "assistant", "content": "", "tool_calls": "add(1)"}, "must be a list of"),
        (
            {"role": "assistant", "content": "", "tool_calls": ["add(1)"]},
            "a function with name and arguments",
        ),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"name": "add", "arguments": {}}]},
            "a function",
        ),
        (
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]},
            "a function with name and arguments",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1'}}]},
            "the call of 'add' has the arguments .* must be a mapping, or JSON of one",
        ),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": "[1]"}}]},
            "must be a mapping",
        ),
        ({"role": "tool", "content": "3", "name": 5}, "name=5 must be text"),
    ],
)
def test_what_no_template_takes_is_refused(message: Any, named: str) -> None:
    with pytest.raises(BadMessage, match=named):
        message_of(message)


def test_a_conversation_names_the_message_that_is_refused() -> None:
    with pytest.raises(BadMessage, match="message 2: its role is None"):
        conversation_of([{"role": "user", "content": "1"}, {"content": "2"}])
    with pytest.raises(BadMessage, match="message 1: the prompt ends in a call of a tool; add its result"):
        conversation_of([{"role": "assistant", "tool_calls": [CALL]}])


def test_a_table_gives_calls_arguments_of_others_which_are_left_out() -> None:
    row = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": 1, "b": None}}}]}
    (call,) = without_missing_arguments(row)["tool_calls"]
    assert call == {"function": {"name": "f", "arguments": {"a": 1}}}
    assert without_missing_arguments({"role": "user", "tool_calls": None}) == {
        "role": "user",
        "tool_calls": None,
    }


def test_a_response_continues_a_message_of_the_assistant_with_its_fields() -> None:
    user, begun = Message("user", "1+1"), Message("assistant", "It is", {"name": "a"})
    assert with_response((user,), "2") == (user, Message("assistant", "2"))
    assert with_response((user, begun), " 2") == (user, Message("assistant", "It is 2", {"name": "a"}))


def test_a_prompt_asks_what_stands_before_the_beginning_of_the_response() -> None:
    assert question_of("1+1") == "1+1"
    assert question_of((Message("user", "1+1"),)) == "1+1"
    assert question_of((Message("user", "1+1"), Message("assistant", "It is"))) == "1+1"


def test_openai_gets_arguments_as_text_and_people_see_calls() -> None:
    mapping = {**CALL, "function": {"name": "add", "arguments": {"a": 1}}}
    for call in (CALL, mapping):
        message = message_of({"role": "assistant", "content": "Wait.", "tool_calls": [call]})
        (sent,) = as_openai(message)["tool_calls"]
        assert json.loads(sent["function"]["arguments"]) == {"a": 1}
        assert as_text(message) == 'Wait.\n{"name": "add", "arguments": {"a": 1}}'
    assert (
        as_text(Message("assistant", "", {"tool_calls": [CALL]})) == '{"name": "add", "arguments": {"a": 1}}'
    )
    assert as_text(Message("user", "")) == ""


def nested(levels: int, *, key: str | None = None) -> Any:
    value: Any = [] if key is None else {}
    for _ in range(levels - 1):
        value = [value] if key is None else {key: value}
    return value


@pytest.mark.parametrize("key", [None, "a"])
def test_as_many_levels_as_are_allowed_are_shallow_and_one_more_is_not(key: str | None) -> None:
    assert is_shallow(nested(MAX_LEVELS, key=key))
    assert not is_shallow(nested(MAX_LEVELS + 1, key=key))
    assert not is_shallow([1, {"b": nested(MAX_LEVELS, key=key)}])


@pytest.mark.parametrize("value", [None, "[[[", 1, [], {}, [1, "a", None], {"a": [1]}])
def test_what_is_hardly_nested_is_shallow(value: Any) -> None:
    assert is_shallow(value)


@pytest.mark.parametrize("levels", [MAX_LEVELS + 1, 100_000])
def test_arguments_of_a_call_that_are_nested_too_deeply_are_a_bad_message(levels: int) -> None:
    call = {"function": {"name": "add", "arguments": "[" * levels + "]" * levels}}
    with pytest.raises(BadMessage, match=f"nested deeper than {MAX_LEVELS} levels"):
        plain_call(call)
