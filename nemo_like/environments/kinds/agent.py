"""The kind ``agent``: agents of the user's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nemo_like.config.keys import Key
from nemo_like.config.problems import Problem
from nemo_like.environments.bubblewrap import sandbox_problems
from nemo_like.environments.kind import Kind
from nemo_like.environments.options import EnvConfig
from nemo_like.environments.shared_options import AgentOptions


def _problems(name: str, envs: Mapping[str, EnvConfig]) -> Iterator[Problem]:
    env = envs[name]
    yield from _options(name, env)
    prefix = f"env.{name}"
    if env.check_at_start:
        yield Problem(
            key=f"{prefix}.check_at_start=true",
            rule="has nothing to ask an agent about: there is no response before the policy is there",
            remedy="set it to false",
        )
    if env.max_turns != 1:
        yield Problem(
            key=f"{prefix}.max_turns={env.max_turns}",
            rule="would do nothing: an agent decides how often it calls",
            remedy=f"set it to 1; {prefix}.options.max_calls is the limit of an agent",
        )
    if env.batch_size != 1:
        yield Problem(
            key=f"{prefix}.batch_size={env.batch_size}",
            rule="must be 1 for agents: the sessions of one call would wait for each other",
            remedy=f"{prefix}.max_concurrency says how many sessions a process has at once",
        )


def _options(name: str, env: EnvConfig) -> Iterator[Problem]:
    options, prefix = env.options, f"env.{name}.options"
    has_agent, has_command = bool(options.get("agent")), bool(options.get("command"))
    if has_agent == has_command:
        yield Problem(
            key=f"{prefix}.agent={options.get('agent')}",
            rule="and options.command exclude each other, and one of them must say what runs",
            remedy="agent: package.module:name for a function or a class, command: [program, argument] else",
        )
    timeout_s = options.get("timeout_s")
    if isinstance(timeout_s, int | float) and not timeout_s < env.timeout_s:
        yield Problem(
            key=f"{prefix}.timeout_s={timeout_s:g}",
            rule=f"must be below env.{name}.timeout_s={env.timeout_s:g}, after which the process is replaced",
            remedy=f"set env.{name}.timeout_s to {timeout_s + 30:g}",
        )
    if options.get("tool_choice") not in ("auto", "required"):
        yield Problem(
            key=f"{prefix}.tool_choice={options.get('tool_choice')}",
            rule="must be auto or required",
            remedy="",
        )


def _sandbox_of_command(name: str, env: EnvConfig) -> Iterator[Problem]:
    if env.options.get("command"):
        yield from sandbox_problems(name, env)


KIND = Kind(
    about="An agent of your own calls the policy at an endpoint, as it would call OpenAI or "
    "Anthropic: docs/how_to/agents.md. Either `agent` names a function or a class with "
    "tools, or `command` a program.",
    reward="what an agent of yours returns, which calls the policy at an endpoint: [agents.md](agents.md)",
    example="`{agent: 'my_agents:solve'}`",
    options=AgentOptions,
    base={
        "batch_size": Key("no session waits for another", 1),
        "max_concurrency": Key(
            "sessions that one process has under way at once; a command takes a process of its own", 512
        ),
        "timeout_s": Key(
            "must be above options.timeout_s: a process that does not keep that deadline itself is replaced",
            150.0,
        ),
        "check_at_start": Key("there is no response that could be judged without the policy", False),
    },
    judge="nemo_like.environments.agent:agent",
    answers=True,
    problems=_problems,
    machine_problems=_sandbox_of_command,
)
