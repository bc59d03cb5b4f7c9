"""What an agent's calls become: the tokens of prompts, and what continues what."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_like.data.tokenizer import Tokenizer
from nemo_like.generation.interface import CallSampling, GroupRequest, GroupResult, Response
from nemo_like.generation.sampling import SamplingSettings
from nemo_like.rollout.agents.agent_calls import AgentSession, CallAnswerer, CallRequest
from nemo_like.rollout.agents.agent_chat_api import read_chat_request, read_completion_request
from nemo_like.rollout.agents.agent_engines import EngineCalls
from nemo_like.rollout.agents.agent_messages_api import as_chat as messages_as_chat
from nemo_like.rollout.agents.agent_prompts import AgentPrompts
from nemo_like.rollout.agents.agent_request import BadRequest
from nemo_like.rollout.agents.agent_responses_api import as_chat as responses_as_chat
from nemo_like.rollout.agents.agent_tools import ToolUse
from nemo_like.rollout.agents.agent_work import RequestWork
from scripts.demo_model.tool_tokenizer import TEMPLATE, save_tokenizer
from tests.unit.data.tokenizers_at_tiny_size import BOS, BOS_ID, with_post_processor
from tests.unit.rollout.conversations import conversation

GRAMMAR = '{"regex": "[0-9]+"}'
USER = {"role": "user", "content": "1+2?"}
CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}


class Host:
    """A session's calls, and the engine that answers each with a text that is given beforehand and an eos."""

    name = "engine-0"

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.prompts: list[tuple[int, ...]] = []
        self.grammars: list[str | None] = []
        self._said = ""
        sampling = SamplingSettings(
            temperature=1.0,
            top_p=1.0,
            top_k=0,
            max_new_tokens=50,
            stop_token_ids=tokenizer.end_token_ids,
            structured_outputs=GRAMMAR,
        )
        self._session = AgentSession(
            key="k",
            restart_key="r",
            name="0/0",
            conversation=conversation(max_tokens=500),
            sampling=sampling,
            engine=0,
            policy_version=0,
            tool_parser=None,
            max_calls=10,
        )

    async def submit(
        self, method: str, groups: Sequence[GroupRequest], sampling: CallSampling, sink: object
    ) -> None:
        (group,) = groups
        self.prompts.append(group.prompt_ids)
        self.grammars.append(sampling.structured_outputs)
        ids = np.array([*self.tokenizer.encode_text(self._said), self.tokenizer.eos_token_id], np.int32)
        response = Response(ids, np.zeros(len(ids), np.float32), is_truncated=False)
        self._calls.on_groups([GroupResult(group.request_id, (response,), 0)])

    def ask(self, wanted: CallRequest, said: str) -> tuple[str, int]:
        """Return the text of the call's prompt, and how many of its tokens continue an earlier call's."""
        self._said = said

        async def answered() -> int:
            self._calls = EngineCalls([self], None)
            answerer = CallAnswerer(AgentPrompts(self.tokenizer), self._calls, 1000, RequestWork())
            return (await answerer.answer(self._session, wanted)).num_continued

        num_continued = asyncio.run(answered())
        return self.tokenizer.decode(self.prompts[-1]), num_continued


def chat(*messages: dict[str, Any]) -> CallRequest:
    return read_chat_request({"messages": [*messages]}, None)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    save_tokenizer(tmp_path)
    return Host(Tokenizer(tmp_path))


def test_messages_that_end_in_the_assistants_are_continued(host: Host) -> None:
    begun = {"role": "assistant", "content": "It is"}
    assert host.ask(chat(USER, begun), " 3") == ("? 1+2?\n> It is", 0)
    # What was begun and what followed are one message, whose tokens a later call continues.
    whole = {"role": "assistant", "content": "It is 3"}
    text, num_continued = host.ask(chat(USER, whole, {"role": "user", "content": "sure?"}), "yes")
    assert text == "? 1+2?\n> It is 3<eos>\n? sure?\n> "
    assert num_continued == len("? 1+2?\n> It is 3") + 1
    assert host.prompts[1][:num_continued] == (*host.prompts[0], *host.tokenizer.encode_text(" 3<eos>"))


def test_a_call_follows_the_grammar_of_its_task_unless_it_brings_tools_or_a_grammar(host: Host) -> None:
    own, tools_alone = (ToolUse(None, None, grammar) for grammar in ('{"choice": ["a"]}', None))
    for wanted in (chat(USER), replace(chat(USER), tools=own), replace(chat(USER), tools=tools_alone)):
        host.ask(wanted, "3")
    assert host.grammars == [GRAMMAR, '{"choice": ["a"]}', None]


def test_a_beginning_and_its_rest_may_stay_two_messages(host: Host) -> None:
    begun, rest = {"role": "assistant", "content": "It is"}, {"role": "assistant", "content": " 3"}
    host.ask(chat(USER, begun), " 3")
    text, num_continued = host.ask(chat(USER, begun, rest, {"role": "user", "content": "sure?"}), "yes")
    assert text == "? 1+2?\n> It is 3<eos>\n? sure?\n> "
    assert num_continued == len("? 1+2?\n> It is 3") + 1


def test_a_conversation_may_begin_with_the_assistant(host: Host) -> None:
    assert host.ask(chat({"role": "assistant", "content": "It is"}), " 3") == ("> It is", 0)
    text, num_continued = host.ask(chat({"role": "assistant", "content": "It is 3"}, USER), "yes")
    assert (text, num_continued) == ("> It is 3<eos>\n? 1+2?\n> ", len("> It is 3") + 1)


def test_an_answer_that_is_sent_back_to_be_continued_begins_anew_without_its_end(host: Host) -> None:
    host.ask(chat(USER), "It is")
    text, num_continued = host.ask(chat(USER, {"role": "assistant", "content": "It is"}), " 3")
    assert (text, num_continued) == ("? 1+2?\n> It is", 0)


def test_a_call_of_a_tool_without_its_result_is_refused(host: Host) -> None:
    with pytest.raises(BadRequest, match="the last message calls a tool, and its result is missing"):
        host.ask(chat(USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}), "3")


def test_a_completion_begins_with_the_special_tokens_of_a_prompt_once(tmp_path: Path) -> None:
    host = Host(with_post_processor(tmp_path, f"{BOS} $A <eos>"))
    for text in ("1+2=", f"{BOS}1+2="):
        host.ask(read_completion_request({"prompt": text}, None), "3")
        assert host.prompts[-1] == (BOS_ID, *host.tokenizer.encode_text("1+2="))
    # One that continues an earlier call has its tokens, and no others between.
    host.ask(read_completion_request({"prompt": "1+2=3 and"}, None), "4")
    new = host.tokenizer.encode_text(" and")
    assert host.prompts[-1] == (BOS_ID, *host.tokenizer.encode_text("1+2=3<eos>"), *new)
    # Tokens are taken as they are.
    host.ask(read_completion_request({"prompt": [7, 8]}, None), "4")
    assert host.prompts[-1] == (7, 8)


def test_thoughts_come_to_the_template_from_every_api(tmp_path: Path) -> None:
    save_tokenizer(tmp_path)
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE.replace("> {{ message", "> ({{ message.reasoning_content }}){{ message"))
    host = Host(Tokenizer(tmp_path, template))
    by_messages = messages_as_chat(
        {
            "messages": [
                USER,
                {
                    "role": "assistant",
                    "content": [
                        {"type": "thinking", "thinking": "1 and 2", "signature": "x"},
                        {"type": "text", "text": "It is"},
                    ],
                },
                {"role": "user", "content": "sure?"},
            ],
            "max_tokens": 5,
        }
    )
    by_responses = responses_as_chat(
        {
            "input": [
                USER,
                {"type": "reasoning", "summary": [{"type": "summary_text", "text": "1 and 2"}]},
                {
                    "type": "message",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "It is"}],
                },
                {"role": "user", "content": "sure?"},
            ]
        },
        {},
    )
    for body in (by_messages, by_responses):
        assert host.ask(read_chat_request(body, None), "yes")[0].startswith(
            "? 1+2?\n> (1 and 2)It is<eos>\n? sure?"
        )


def test_thoughts_before_a_call_belong_to_it() -> None:
    items = [
        {"type": "reasoning", "content": [{"type": "reasoning_text", "text": "add"}]},
        {"type": "function_call", "call_id": "1", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "3"},
    ]
    called, _ = responses_as_chat({"input": items}, {})["messages"]
    assert called["reasoning_content"] == "add"
    blocks = [
        {"type": "thinking", "thinking": "add"},
        {"type": "tool_use", "id": "1", "name": "add", "input": {}},
    ]
    (called,) = messages_as_chat({"messages": [{"role": "assistant", "content": blocks}]})["messages"]
    assert called["reasoning_content"] == "add"
