"""What a server that answers in place of engines is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nemo_like.data.interface import Prompt
from nemo_like.data.messages import conversation_of
from nemo_like.generation.endpoint_engine import EndpointEngine
from nemo_like.generation.interface import GroupRequest, GroupResult
from nemo_like.generation.sampling import SamplingSettings
from tests.unit.data.tokenizers_at_tiny_size import BOS, save_with_post_processor
from tests.unit.json_server import json_server
from tests.unit.rules.test_evaluation_rules import evaluation

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "2", "tool_call_id": "c1"},
]
BEGUN = [*CHAT, {"role": "assistant", "content": "It is"}]
ANSWER = {
    "id": "1",
    "object": "any",
    "created": 0,
    "model": "m",
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "text": "2",
            "message": {"role": "assistant", "content": "2"},
        }
    ],
}


class Sink:
    def __init__(self) -> None:
        self.told = asyncio.Queue[tuple[str, tuple[Any, ...]]]()

    def submit(self, method: str, *arguments: Any) -> None:
        self.told.put_nowait((method, arguments))


@pytest.fixture
def sent(checkpoint: Path, tmp_path: Path) -> Any:
    """``sent(prompt)``: the path and the body of the request for a response to it."""
    save_with_post_processor(tmp_path / "tokenizer", f"{BOS} $A")

    async def ask(url: str, said: Prompt, overrides: Sequence[str]) -> Sequence[GroupResult]:
        server = (f"evaluation.base_url={url}/v1", "evaluation.model=m", *overrides)
        cfg = evaluation(checkpoint, *server).evaluation
        assert cfg is not None
        sink = Sink()
        engine = EndpointEngine(name="e", cfg=cfg, tokenizer_name=str(tmp_path / "tokenizer"))
        request = GroupRequest("r", (3, 4), (7,), said=said)
        await engine.submit(
            [request], SamplingSettings(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=8), sink
        )
        method, arguments = await sink.told.get()
        assert method == "on_groups", arguments
        return arguments[0]

    def of(said: Prompt, *overrides: str) -> tuple[str, Any]:
        with json_server(ANSWER) as server:
            (result,) = asyncio.run(ask(server.url, said, overrides))
        assert result.responses[0].text == "2"
        (asked,) = server.asked
        return asked

    return of


def test_a_text_goes_without_the_bos_that_the_server_adds(sent: Any) -> None:
    for text in (f"{BOS}1+1=", "1+1="):
        path, body = sent(text)
        assert (path, body["prompt"]) == ("/v1/completions", "1+1=")


def test_messages_go_with_all_of_their_fields_as_openai_has_them(sent: Any) -> None:
    path, body = sent(conversation_of(CHAT))
    call = {**CALL, "function": {"name": "add", "arguments": '{"a": 1}'}}
    assert path == "/v1/chat/completions"
    assert body["messages"] == [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    assert "continue_final_message" not in body


def test_a_last_message_of_the_assistant_is_continued(sent: Any) -> None:
    _, body = sent(conversation_of(BEGUN), "evaluation.extra_body={top_a: 1}")
    assert body["messages"][-1] == {"role": "assistant", "content": "It is"}
    assert (body["continue_final_message"], body["add_generation_prompt"], body["top_a"]) == (True, False, 1)
