"""What servers and agents get of a prompt's messages: all of their fields."""

from __future__ import annotations

from nemo_like.data.messages import conversation_of
from nemo_like.environments.agent_command import task_of
from tests.unit.environments.asking import ask, turn
from tests.unit.json_server import json_server

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
RECORD = [
    {"role": "user", "content": "1+1?", "name": "ann"},
    {"role": "assistant", "content": "", "tool_calls": [CALL], "reasoning_content": "?"},
    {"role": "tool", "content": "2", "tool_call_id": "c1"},
    {"role": "assistant", "content": "It is"},
]


def test_a_server_that_judges_gets_whole_messages() -> None:
    with json_server({"feedback": [1.0]}) as server:
        (one,) = ask("http", turn(" 2", prompt=conversation_of(RECORD)), url=server.url)
    assert one.rewards == {"reward": 1.0}
    ((_, body),) = server.asked
    assert (body["turns"][0]["prompt"], body["turns"][0]["response"]) == (RECORD, " 2")


def test_an_agent_gets_whole_messages() -> None:
    assert task_of(turn("", prompt=conversation_of(RECORD)))["prompt"] == RECORD
    assert task_of(turn("", prompt="1+1"))["prompt"] == "1+1"
