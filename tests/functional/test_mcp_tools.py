"""Tools of a real MCP server, a program of its own, called by responses and judged by another environment."""

from __future__ import annotations

import asyncio
from typing import Any

import psutil
import pytest

from nemo_like.environments.environment_data import EnvironmentPrompts
from nemo_like.environments.interface import FailureKind, Feedback, Turn
from nemo_like.environments.mcp_tools import McpEnvironment
from nemo_like.environments.registry import options_of
from nemo_like.environments.server import EnvironmentServer
from nemo_like.environments.tool_pool import ToolPool
from tests.functional.hub_fixtures import MCP_SERVER
from tests.unit.environments.asking import turn
from tests.unit.environments.configs import env_config

pytestmark = pytest.mark.timeout(300)

ADD = '<tool_call>{"name": "add", "arguments": {"first": 19, "second": 23}}</tool_call>'


def config(**options: Any) -> Any:
    return env_config(
        "mcp", options={"servers": {"calculator": {"command": MCP_SERVER}}, "judge": "exact", **options}
    )


class _Pool:
    """A pool of one server, without actors."""

    unanswered: tuple[str, ...] = ()
    wants_tokens = False

    def __init__(self, server: EnvironmentServer) -> None:
        self._server = server

    async def step(self, turns: Any) -> Any:
        return await self._server.step(turns)


def ask(*turns: Turn, **options: Any) -> list[Feedback]:
    async def asked() -> list[Feedback]:
        tools = EnvironmentServer("tools", config(**options))
        judge = EnvironmentServer("exact", env_config("exact_match"))
        try:
            pool = ToolPool(_Pool(tools), _Pool(judge))
            return [(await pool.step([one]))[0] for one in turns]
        finally:
            await tools.close()
            await judge.close()

    return asyncio.run(asked())


def calling(response: str, answer: str = "42") -> Turn:
    return turn(response, answer, is_last=False)


def test_a_call_is_answered_and_the_answer_is_judged() -> None:
    called, judged, wrong = ask(calling(f"I add. {ADD}"), calling("42"), calling("41"))
    assert (called.observation, called.is_done, called.rewards) == ("42", False, {})
    assert called.metrics == {"calls_per_turn": 1.0, "refused_call_share": 0.0}
    assert (judged.is_done, judged.reward, judged.metrics["calls_per_turn"]) == (True, 1.0, 0.0)
    assert wrong.reward == 0.0


def test_several_calls_of_a_response_are_answered_in_order() -> None:
    other = ADD.replace("19", "20")
    (called,) = ask(calling(ADD + other), result_template="({result})")
    assert called.observation == "(42)(43)"


def test_a_call_that_cannot_be_made_is_told_to_the_policy() -> None:
    deep = f"{'[' * 100_000}{']' * 100_000}"
    malformed, too_deep, no_unicode, unknown, lacking = ask(
        calling("<tool_call>{add}</tool_call>"),
        calling(f'<tool_call>{{"name": "add", "arguments": {{"first": {deep}}}}}</tool_call>'),
        calling('<tool_call>{"name": "add", "arguments": {"first": "\\ud800"}}</tool_call>'),
        calling('<tool_call>{"name": "multiply"}</tool_call>'),
        calling('<tool_call>{"name": "add", "arguments": {"first": 1}}</tool_call>'),
    )
    for one in (malformed, too_deep, no_unicode):
        assert one.observation == 'error: a call is {"name": ..., "arguments": {...}} in JSON'
    assert unknown.observation == "error: there is no tool 'multiply'; there are add, leave"
    assert str(lacking.observation).startswith("error: ")
    assert {one.metrics["refused_call_share"] for one in (malformed, too_deep, unknown, lacking)} == {1.0}


def test_a_call_in_the_last_turn_is_judged_as_an_answer() -> None:
    (judged,) = ask(turn(ADD, "42"))
    assert (judged.is_done, judged.reward) == (True, 0.0)


def test_a_server_that_ends_costs_its_sample_and_is_started_again() -> None:
    died, called = ask(calling('<tool_call>{"name": "leave"}</tool_call>'), calling(ADD))
    assert died.failure is not None
    assert died.failure.kind is FailureKind.died
    assert called.observation == "42"


def test_a_server_that_ends_takes_the_other_servers_with_it_so_that_none_is_left_behind() -> None:
    counting = "import mcp.server.mcpserver as m; s = m.MCPServer('c'); s.tool()(len); s.run()"
    servers = {
        "calculator": {"command": MCP_SERVER},
        "counting": {"command": [MCP_SERVER[0], "-c", counting]},
    }
    options = options_of(config(servers=servers))

    async def scenario() -> list[str]:
        environment = McpEnvironment(options)
        for response in ('<tool_call>{"name": "leave"}</tool_call>', ADD):
            await environment.step([calling(response)])
        return [" ".join(child.cmdline()[1:]) for child in psutil.Process().children()]

    running = asyncio.run(scenario())
    assert sum(counting in one for one in running) == 1, running


def test_the_tools_are_listed_as_chat_templates_take_them() -> None:
    add, leave = EnvironmentPrompts({"tools": config()}).tools("tools")
    assert (add["type"], add["function"]["name"], leave["function"]["name"]) == ("function", "add", "leave")
    assert add["function"]["description"] == "Add two numbers."
    assert add["function"]["parameters"]["required"] == ["first", "second"]
    assert EnvironmentPrompts({"exact": env_config("exact_match")}).tools("exact") == ()


def test_a_server_that_does_not_start_is_told() -> None:
    broken = config(servers={"gone": {"command": [MCP_SERVER[0], "-c", "raise SystemExit(1)"]}})
    with pytest.raises(ValueError, match=r"env\.tools \(kind=mcp\): its tools cannot be listed"):
        EnvironmentPrompts({"tools": broken}).tools("tools")
