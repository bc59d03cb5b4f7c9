"""Rules on environments of packages that have many (hubs), and on tools of MCP servers."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from functools import cache

from nemo_like.config.problems import Problem
from nemo_like.environments.kind_options import HUB_MODULES, options_of
from nemo_like.environments.options import EnvConfig, EnvironmentKind

_LOOK_TIMEOUT_S = 60.0
_SETUP = "bash scripts/setup.sh --hubs makes .venv-hubs with all packages of hubs"


def hub_problems(name: str, env: EnvConfig) -> Iterator[Problem]:
    """Yield every problem with the options of a hub. Other kinds have no problem here."""
    if env.kind not in HUB_MODULES:
        return
    options = options_of(env)
    if env.kind is EnvironmentKind.verifiers and not options.env.get("taskset"):
        yield Problem(
            key=f"env.{name}.options.env",
            rule="names no taskset, whose tasks are the problems",
            remedy="for example env={taskset: {id: my_taskset}}",
        )
    if env.kind is not EnvironmentKind.textarena:
        return
    if options.num_players > 1 and options.opponent is None:
        yield Problem(
            key=f"env.{name}.options.opponent=null",
            rule=f"leaves {options.num_players - 1} of the players without moves",
            remedy="name a function, module:function, that moves for what a player sees; or num_players=1",
        )


def hub_machine_problems(used: Mapping[str, EnvConfig]) -> Iterator[Problem]:
    """Yield every problem for which this machine could not run the packages of hubs and the servers of
    tools that the environments ``used`` by a run have."""
    for name, env in used.items():
        if env.kind in HUB_MODULES:
            yield from _package(name, env)
        elif env.kind is EnvironmentKind.mcp:
            yield from _programs(name, env)


def has_interpreter(env: EnvConfig) -> bool:
    """Return whether the interpreter that has a hub's package is on this machine."""
    python = env.options.get("python")
    return python is None or shutil.which(str(python)) is not None


def _package(name: str, env: EnvConfig) -> Iterator[Problem]:
    python, module = env.options.get("python"), HUB_MODULES[env.kind]
    key = f"env.{name}.options.python={python}"
    if python is None:
        if not _has_module(sys.executable, module):
            yield Problem(
                key=f"env.{name}.kind={env.kind.name}",
                rule=f"needs the Python package {module}, which this interpreter does not have",
                remedy=f"install it, or name another interpreter in options.python; {_SETUP}",
            )
    elif not has_interpreter(env):
        yield Problem(key=key, rule="is no Python interpreter here", remedy=_SETUP)
    elif not _has_module(str(python), module):
        yield Problem(
            key=key,
            rule=f"does not have the Python package {module}, which kind={env.kind.name} needs",
            remedy=f"install it there; {_SETUP}",
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


def mcp_problems(envs: Mapping[str, EnvConfig], name: str) -> Iterator[Problem]:
    """Yield every problem with the servers and the judge of ``envs[name]``, an environment of kind mcp."""
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
    elif envs[judge].kind in (EnvironmentKind.mcp, *HUB_MODULES) or envs[judge].max_turns > 1:
        yield Problem(
            key=f"{prefix}.judge={judge}",
            rule=f"is of kind {envs[judge].kind.name}, which judges no single response",
            remedy="name one that does, such as math_verify, exact_match or judge, with max_turns=1",
        )
    if env.max_turns == 1:
        yield Problem(
            key=f"env.{name}.max_turns=1",
            rule="leaves no turn after a call of a tool",
            remedy="set it to the largest number of responses, calls and answer together",
        )


@cache
def _has_module(python: str, module: str) -> bool:
    """Return whether an interpreter finds a module's top package, without importing it."""
    top = module.partition(".")[0]
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({top!r}) is None)"
    command = [python, "-P", "-c", look]
    ended = subprocess.run(command, check=False, timeout=_LOOK_TIMEOUT_S, capture_output=True, env={})
    return ended.returncode == 0
