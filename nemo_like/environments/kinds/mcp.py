"""The kind ``mcp``: tools of MCP servers."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Annotated, Any

from nemo_like.config.keys import Key
from nemo_like.config.problems import Problem
from nemo_like.environments.kind import Kind
from nemo_like.environments.options import EnvConfig
from nemo_like.environments.registry import kind_of


@dataclass(kw_only=True, slots=True)
class McpOptions:
    """Tools of MCP servers, which responses call; the environment ``judge`` judges a response without a
    call."""

    servers: Annotated[
        dict[str, Any],
        Key(
            "programs that speak MCP, by name, for example {tools: {command: [python, -m, "
            "my_server], env: {}}}",
            {},
        ),
    ]
    judge: Annotated[str, Key("the environment, a key of env, that judges the last response")]
    call_pattern: Annotated[
        str,
        Key(
            'group 1 of each match: {"name": ..., "arguments": {...}}',
            "<tool_call>\\s*(\\{.*?\\})\\s*</tool_call>",
        ),
    ]
    result_template: Annotated[
        str, Key("what the policy sees of each result; {result} stands for the text", "{result}")
    ]
    max_result_characters: Annotated[int, Key("of one result; more is cut", 8192, above=0)]
    call_timeout_s: Annotated[float, Key("deadline of one call", 30.0, above=0)]


def _problems(name: str, envs: Mapping[str, EnvConfig]) -> Iterator[Problem]:
    env, prefix = envs[name], f"env.{name}.options"
    servers, judge = env.options.get("servers"), str(env.options.get("judge"))
    for server, given in servers.items() if isinstance(servers, Mapping) else ():
        command = given.get("command") if isinstance(given, Mapping) else None
        if not isinstance(command, list) or not command or not all(isinstance(one, str) for one in command):
            yield Problem(
                key=f"{prefix}.servers.{server}",
                rule="has no command, a list of a program and its arguments",
                remedy=f"for example {{{server}: {{command: [python, -m, my_server]}}}}",
            )
    if not servers:
        yield Problem(
            key=f"{prefix}.servers",
            rule="names no server, so there is no tool",
            remedy="for example {tools: {command: [python, -m, my_server]}}",
        )
    if judge not in envs:
        close = get_close_matches(judge, envs.keys() - {name}, n=1)
        yield Problem(
            key=f"{prefix}.judge={judge}",
            rule=f"is not an environment of this configuration, which has {', '.join(envs)}",
            remedy=f"did you mean {close[0]}?" if close else "it judges the responses that call no tool",
        )
    elif kind_of(envs[judge]).answers or envs[judge].max_turns > 1:
        yield Problem(
            key=f"{prefix}.judge={judge}",
            rule=f"is of kind {envs[judge].kind}, which judges no single response",
            remedy="name one that does, such as math_verify, exact_match or judge, with max_turns=1",
        )
    if env.max_turns == 1:
        yield Problem(
            key=f"env.{name}.max_turns=1",
            rule="leaves no turn after a call of a tool",
            remedy="set it to the largest number of responses, calls and answer together",
        )


def _programs(name: str, env: EnvConfig) -> Iterator[Problem]:
    servers = env.options.get("servers")
    for server, given in servers.items() if isinstance(servers, Mapping) else ():
        command = given.get("command") if isinstance(given, Mapping) else None
        if command and shutil.which(str(command[0])) is None:
            yield Problem(
                key=f"env.{name}.options.servers.{server}.command",
                rule=f"names no program that is here: {command[0]}",
                remedy="",
            )


KIND = Kind(
    about="Tools of MCP servers. A response may call them; one that does not is the answer, "
    "which another environment judges. The chat template describes the tools to the "
    "policy; a prompt of plain text must do so itself.",
    reward="[tools of MCP servers](hubs.md#tools-of-mcp-servers) answer calls; another environment judges "
    "the response without a call",
    example="`{servers: {tools: {command: [python, -m, my_server]}}, judge: math}`",
    options=McpOptions,
    base={
        "max_turns": Key("responses, calls and answer together", 4),
        "observation_role": Key("the role under which a chat template renders results", "tool"),
        "max_concurrency": Key("calls that one actor has under way at once", 32),
        "batch_size": Key("no turn waits for another's tools", 1),
        "timeout_s": Key("above call_timeout_s times the calls of one response", 120.0),
    },
    judge="nemo_like.environments.mcp_tools:McpEnvironment",
    answers=True,
    last_judge="judge",
    call_pattern="call_pattern",
    tools="nemo_like.environments.mcp_tools:listed_tools",
    problems=_problems,
    machine_problems=_programs,
    package=("mcp", "mcp"),
)
