"""What becomes of requests with anything in the place of anything."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.rollout.agents.agent_chat_api import read_chat_request, read_completion_request
from nemo_like.rollout.agents.agent_messages_api import as_chat as messages_as_chat
from nemo_like.rollout.agents.agent_request import BadRequest, check_token_ids, read_body
from nemo_like.rollout.agents.agent_responses_api import as_chat as responses_as_chat

# Words that the APIs know, so that some values get far.
_WORDS = (
    *("user", "assistant", "system", "tool", "text", "message", "reasoning", "function", "function_call"),
    *("tool_use", "tool_result", "thinking", "allowed_tools", "json_schema", "auto", "required", "{}", "[1"),
)
_KEYS = (
    *(
        "role",
        "content",
        "type",
        "text",
        "tool_calls",
        "function",
        "name",
        "arguments",
        "id",
        "input",
        "output",
    ),
    *("summary", "thinking", "format", "mode", "tools", "input_schema", "tool_use_id", "call_id"),
)
_FIELDS = (
    *(
        "messages",
        "prompt",
        "input",
        "system",
        "instructions",
        "previous_response_id",
        "tools",
        "tool_choice",
    ),
    *("chat_template_kwargs", "stream_options", "text", "stop", "stop_sequences", "n", "max_tokens", "seed"),
    *(
        "logprobs",
        "top_logprobs",
        "max_completion_tokens",
        "parallel_tool_calls",
        "conversation",
        "functions",
    ),
)
_ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(_WORDS) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(_KEYS), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(_FIELDS), _ANY, max_size=6))
def test_every_request_is_understood_or_refused(body: dict[str, Any]) -> None:
    with suppress(BadRequest):
        read_chat_request(body, None)
    with suppress(BadRequest):
        read_completion_request(body, None)
    for as_chat in (messages_as_chat, lambda body: responses_as_chat(body, {})):
        with suppress(BadRequest):
            read_chat_request(as_chat(body), None)


@given(st.dictionaries(st.text(), _ANY, max_size=3))
def test_a_body_of_unicode_is_read_as_it_was_written(body: dict[str, Any]) -> None:
    written = json.dumps(body).encode()
    assert repr(read_body(written)) == repr(json.loads(written))


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"{", "no JSON"),
        (b"\xff", "no JSON in UTF-8"),
        (b'{"a": "\\uD83D"}', "surrogates"),
        (b'{"\\udc00": 1}', "surrogates"),
        (b'{"a": "\xed\xa0\xbd\xed\xb8\x80"}', "no JSON in UTF-8"),
        (b"[" * 200 + b"]" * 200, "nested deeper"),
        (b"3", "must be a JSON object"),
    ],
)
def test_what_is_no_object_of_unicode_is_refused(content: bytes, named: str) -> None:
    with pytest.raises(BadRequest, match=named):
        read_body(content)


def test_pairs_of_surrogates_are_characters_and_an_empty_body_is_an_empty_object() -> None:
    assert read_body(b'{"a": "\\ud83d\\ude00 \\\\ud800"}') == {"a": "\U0001f600 \\ud800"}
    assert read_body(b"") == {}


def test_tokens_are_those_that_there_are() -> None:
    check_token_ids((), 5)
    check_token_ids((0, 4), 5)
    for wrong in (-1, 5, 10**30):
        with pytest.raises(BadRequest, match="ids are 0 to 4"):
            check_token_ids((0, wrong), 5)
