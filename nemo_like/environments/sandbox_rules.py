"""Rules on what a machine must have to run programs in a sandbox."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from nemo_like.config.problems import Problem
from nemo_like.environments.bubblewrap import bubblewrap_failure
from nemo_like.environments.kind_options import SandboxMode
from nemo_like.environments.options import EnvConfig, EnvironmentKind


def sandbox_machine_problems(used: Mapping[str, EnvConfig]) -> Iterator[Problem]:
    """Yield a problem for every environment that needs a sandbox, if this machine cannot make one."""
    for name, env in used.items():
        # The option is read as it is written: the typed options cannot be built where they are wrong.
        starts = env.kind is EnvironmentKind.code or (
            env.kind is EnvironmentKind.agent and bool(env.options.get("command"))
        )
        is_wanted = starts and env.options.get("sandbox") != SandboxMode.none.value
        if is_wanted and (failure := bubblewrap_failure()):
            yield Problem(
                key=f"env.{name}.options.sandbox=required",
                rule=failure,
                remedy="or set it to none, with which programs can do whatever this user can",
            )
