from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_like.data.tokenizer import Tokenizer
from nemo_like.generation.interface import Response
from nemo_like.rollout.agents.agent_chat_api import read_chat_request
from nemo_like.rollout.agents.agent_prompts import AgentPrompts, plain_messages
from nemo_like.rollout.agents.agent_request import BadRequest
from nemo_like.rollout.agents.agent_session import AgentCall
from scripts.demo_model.tool_tokenizer import save_tokenizer


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> AgentPrompts:
    path = tmp_path_factory.mktemp("tokenizer")
    save_tokenizer(Path(path))
    return AgentPrompts(Tokenizer(path))


def called(prompts: AgentPrompts, prompt: str, response: str) -> AgentCall:
    ids = np.array(prompts.encode(response), np.int32)
    tokens = Response(ids, np.zeros(len(ids), np.float32), is_truncated=False)
    return AgentCall(0, None, prompts.encode(prompt), prompt, tokens, response, 0)


CALL: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    ],
}
RESULT = {"role": "tool", "tool_call_id": "1", "content": "3"}


def test_what_follows_a_response_is_rendered_alone_and_its_eos_is_not_repeated(prompts: AgentPrompts) -> None:
    messages = plain_messages([{"role": "user", "content": "1+2"}, CALL, RESULT])
    first = prompts.whole(messages[:1], {})
    assert first == "? 1+2\n> "
    whole = prompts.whole(messages, {})
    ended = called(
        prompts, first, '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 2}}</tool_call><eos>'
    )
    assert first + ended.text + prompts.after(ended, messages, 2, {}) == whole


def test_a_response_that_was_cut_short_gets_the_end_that_the_template_writes(prompts: AgentPrompts) -> None:
    messages = plain_messages(
        [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, RESULT]
    )
    cut = called(prompts, "? 1\n> ", "2")
    assert prompts.after(cut, messages, 2, {}) == "<eos>\n= 3\n> "


def test_parts_of_text_are_joined_and_arguments_of_calls_are_read() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    first, second = plain_messages([{"role": "developer", "content": parts}, CALL])
    assert first == {"role": "system", "content": "a\nb"}
    assert second["content"] == ""
    assert second["tool_calls"][0]["function"]["arguments"] == {"a": 1, "b": 2}


@pytest.mark.parametrize(
    ("messages", "named"),
    [
        ([], "not empty"),
        ("hello", "must be a list"),
        ([{"content": "x"}], "a role"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "'image_url' is not served",
        ),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "name and arguments"),
    ],
)
def test_messages_that_cannot_be_served_are_refused_with_the_reason(messages: Any, named: str) -> None:
    with pytest.raises(BadRequest, match=named):
        plain_messages(messages)


def test_arguments_that_are_no_json_stay_text() -> None:
    broken = json.loads(json.dumps(CALL))
    broken["tool_calls"][0]["function"]["arguments"] = '{"a": 1'
    (message,) = plain_messages([broken])
    assert message["tool_calls"][0]["function"]["arguments"] == '{"a": 1'


def test_a_stop_string_is_cut_off_and_named(prompts: AgentPrompts) -> None:
    ids = prompts.encode("one, two; three")
    ends = prompts.tokenizer.end_token_ids
    assert prompts.text_of(ids, ends, [";", ","]) == ("one", ",")
    assert prompts.text_of(prompts.encode("one<eos>"), ends, [";"]) == ("one", None)


def test_a_stop_token_is_no_part_of_the_text_and_a_stop_string_may_be_a_special_token(
    prompts: AgentPrompts,
) -> None:
    ids = prompts.encode("one<pad>")
    assert prompts.text_of(ids, ids[-1:], []) == ("one", None)
    assert prompts.text_of(ids, (), ["<pad>"]) == ("one", "<pad>")


@pytest.mark.parametrize("key", ["max_tokens", "max_completion_tokens"])
def test_limits_of_tokens_are_whole_numbers_by_both_of_their_names(key: str) -> None:
    body = {"messages": [{"role": "user", "content": "1+2"}]}
    assert read_chat_request({**body, key: 3}, None).max_tokens == 3
    for wrong in ("3", 0, -1, 2.5, True):
        with pytest.raises(BadRequest, match=f"{key}=.* must be a whole number"):
            read_chat_request({**body, key: wrong}, None)
