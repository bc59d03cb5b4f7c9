"""Rules on what a machine must have to run programs in a sandbox."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.config.problems import Problem
from nemo_like.environments.bubblewrap import bubblewrap_failure
from nemo_like.environments.options import EnvConfig
from nemo_like.environments.shared_options import SandboxMode


def sandbox_problems(name: str, env: EnvConfig) -> Iterator[Problem]:
    """Yield a problem where an environment wants a sandbox, and this machine cannot make one."""
    # The option is read as it is written: the typed options cannot be built where they are wrong.
    is_wanted = env.options.get("sandbox") != SandboxMode.none.value
    if is_wanted and (failure := bubblewrap_failure()):
        yield Problem(
            key=f"env.{name}.options.sandbox=required",
            rule=failure,
            remedy="or set it to none, with which programs can do whatever this user can",
        )
