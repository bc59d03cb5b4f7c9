"""Rules on the options of environments that run agents."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.config.problems import Problem
from nemo_like.environments.options import EnvConfig


def agent_problems(name: str, env: EnvConfig) -> Iterator[Problem]:
    """Yield every problem with the keys of the environment ``name``, which runs agents."""
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
