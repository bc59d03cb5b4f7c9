"""Messages with all of their fields, converted from records for chat templates, rewards and servers.

record ──▶ message_of ──▶ Message ──┬─▶ for chat templates: plain_call, chat_rendering.py
                                    ├─▶ for rewards, servers and agents: as_record
                                    └─▶ for people and judges: as_text
"""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from nemo_like.data.interface import Message, Prompt

# Fields whose value must be text.
_TEXTS = ("name", "tool_call_id", "reasoning_content", "reasoning", "thinking")
_CALL = '{"type": "function", "function": {"name": ..., "arguments": {...}}}'


class BadMessage(ValueError):
    """A message has a form that is not supported; the text says which."""


def message_of(value: Any) -> Message:
    """Return a message of a record with all of its fields.

    A field that is null counts as missing; content may be null beside tool calls, and becomes empty text.
    Raises BadMessage for a value that is no mapping with ``role`` and ``content``, for tool calls that are
    not in OpenAI's form, and for a known field of the wrong type.
    """
    if not isinstance(value, Mapping):
        raise BadMessage(f"{reprlib.repr(value)} is no message")
    fields = {str(key): one for key, one in value.items() if one is not None}
    role, content, calls = fields.pop("role", None), fields.pop("content", None), fields.get("tool_calls")
    if not calls:
        fields.pop("tool_calls", None)
    elif not isinstance(calls, Sequence) or isinstance(calls, str):
        raise BadMessage(f"tool_calls={reprlib.repr(calls)} must be a list of {_CALL}")
    for call in calls or ():
        _check_arguments(plain_call(call))
    if content is None and calls:
        content = ""
    if not isinstance(role, str) or not isinstance(content, str):
        raise BadMessage(f"its role is {reprlib.repr(role)} and its content {reprlib.repr(content)}")
    if "function_call" in fields:
        raise BadMessage(f"function_call is OpenAI's former field for one call; write tool_calls: [{_CALL}]")
    for name in _TEXTS:
        if not isinstance(fields.get(name, ""), str):
            raise BadMessage(f"{name}={reprlib.repr(fields[name])} must be text")
    return Message(role, content, fields)


def conversation_of(values: Sequence[Any]) -> tuple[Message, ...]:
    """Return the messages of a record, which a response can follow.

    Raises BadMessage as ``message_of`` does, and when the last message calls a tool, whose result is missing.
    """
    messages = []
    for number, value in enumerate(values, start=1):
        try:
            messages.append(message_of(value))
        except BadMessage as error:
            raise BadMessage(f"message {number}: {error}") from error
    if messages and "tool_calls" in messages[-1].extra:
        raise BadMessage(
            f"message {len(messages)}: the prompt ends in a call of a tool; add its result, a message of the "
            "role tool, or leave the call out"
        )
    return tuple(messages)


def plain_call(call: Any) -> dict[str, Any]:
    """Return a tool call as chat templates read it. Arguments that are the JSON text of a mapping, as OpenAI
    writes them, become that mapping; other text stays.

    Raises BadMessage for a value without a function with name and arguments, and for arguments that are
    nested too deeply.
    """
    try:
        function = {key: value for key, value in call["function"].items() if value is not None}
        name, arguments = function["name"], function["arguments"]
        fields = {key: value for key, value in call.items() if value is not None}
    except (AttributeError, KeyError, TypeError) as error:
        raise BadMessage(
            f"a tool call needs a function with name and arguments, {_CALL}, and is {reprlib.repr(call)}"
        ) from error
    if isinstance(arguments, str):
        arguments = _read_arguments(arguments)
    if not is_shallow(arguments):
        raise _too_deep()
    return {
        **fields,
        "type": "function",
        "function": {**function, "name": name, "arguments": arguments},
    }


def _read_arguments(text: str) -> Any:
    """Return arguments parsed from JSON; other text stays, since a template writes what the policy wrote.

    Raises BadMessage for JSON that is nested too deeply.
    """
    try:
        return json.loads(text or "{}")
    except ValueError:
        return text
    except RecursionError:
        raise _too_deep() from None


def _too_deep() -> BadMessage:
    return BadMessage(f"the arguments of a tool call are nested deeper than {MAX_LEVELS} levels")


def _check_arguments(call: Mapping[str, Any]) -> None:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise BadMessage(
            f"the call of {name!r} has the arguments {reprlib.repr(arguments)}; they must be a mapping, or "
            "JSON of one"
        )


def without_missing_arguments(value: Any) -> Any:
    """Return a message of an Arrow table without null arguments in its tool calls.

    Such a table gives every call the arguments of all calls in its column, with null where a call has none.
    """
    if not isinstance(value, Mapping) or not isinstance(value.get("tool_calls"), Sequence):
        return value
    return {**value, "tool_calls": [_without_nulls(call) for call in value["tool_calls"]]}


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(one) for key, one in value.items() if one is not None}
    return value


def is_begun(messages: Sequence[Message]) -> bool:
    """Return whether a conversation ends in a message of the assistant, which the response continues."""
    return bool(messages) and messages[-1].role == "assistant"


def with_response(messages: tuple[Message, ...], response: str) -> tuple[Message, ...]:
    """Return a conversation with the response to it: appended to the last message if that is the assistant's,
    else as a new message."""
    if not is_begun(messages):
        return (*messages, Message("assistant", response))
    return (*messages[:-1], replace(messages[-1], content=messages[-1].content + response))


def as_record(prompt: Prompt) -> str | list[dict[str, Any]]:
    """Return a prompt in the form of records: text, or messages with all of their fields."""
    return prompt if isinstance(prompt, str) else [message.as_mapping() for message in prompt]


def as_openai(message: Message) -> dict[str, Any]:
    """Return a message in the form of OpenAI's API, with the arguments of tool calls as text."""
    fields = message.as_mapping()
    if calls := fields.get("tool_calls"):
        fields["tool_calls"] = [with_text_arguments(plain_call(call)) for call in calls]
    return fields


def with_text_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments as text."""
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def question_of(prompt: Prompt) -> str:
    """Return the question of a prompt: its text, or the last message that is not the beginning of the
    response."""
    if isinstance(prompt, str):
        return prompt
    asked = prompt[:-1] if is_begun(prompt) and len(prompt) > 1 else prompt
    return asked[-1].content


def as_text(message: Message) -> str:
    """Return a message as people read it: its content, and below it each tool call."""
    calls = [plain_call(call)["function"] for call in message.extra.get("tool_calls", ())]
    calls_as_text = [
        json.dumps({"name": one["name"], "arguments": one["arguments"]}, ensure_ascii=False) for one in calls
    ]
    return "\n".join([*([message.content] if message.content or not calls_as_text else []), *calls_as_text])


# Schemas of tools have about two levels for each of their objects. Python allows a thousand recursions.
MAX_LEVELS = 128


def is_shallow(value: Any) -> bool:
    """Return whether lists and objects are nested no deeper than ``MAX_LEVELS``."""
    nested = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_LEVELS):
        nested = [
            part
            for one in nested
            for part in (one.values() if isinstance(one, dict) else one)
            if isinstance(part, dict | list)
        ]
        if not nested:
            return True
    return False
