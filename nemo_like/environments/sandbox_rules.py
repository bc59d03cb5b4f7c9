"""Rules on the programs that a machine needs to run a sandbox."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.config.problems import Problem
from nemo_like.environments.bubblewrap import bubblewrap_failure
from nemo_like.environments.options import EnvConfig
from nemo_like.environments.shared_options import SandboxMode


def sandbox_problems(name: str, env: EnvConfig) -> Iterator[Problem]:
    """Yield a problem when an environment wants a sandbox, and this machine cannot make one."""
    # The untyped option is read: the typed options cannot be built when one of them is wrong.
    is_wanted = env.options.get("sandbox") != SandboxMode.none.value
    if is_wanted and (failure := bubblewrap_failure()):
        yield Problem(
            key=f"env.{name}.options.sandbox=required",
            rule=failure,
            remedy="or set it to none, with which programs can do whatever this user can",
        )
