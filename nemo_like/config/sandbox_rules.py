"""Rules on what a machine must have to run programs in a sandbox."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from functools import cache

from nemo_like.config.environment_options import SandboxMode
from nemo_like.config.problems import Problem
from nemo_like.config.schema import Config, EnvironmentKind
from nemo_like.config.tasks import used_environments

_TRIAL = ("bwrap", "--unshare-pid", "--unshare-net", "--ro-bind", "/", "/", "--proc", "/proc", "true")
_TRIAL_TIMEOUT_S = 30.0


def sandbox_machine_problems(cfg: Config) -> Iterator[Problem]:
    """Yield a problem for every environment that needs a sandbox, if this machine cannot make one."""
    if cfg.cluster.address is not None:
        return  # each actor looks at its own machine when it starts
    for name, env in used_environments(cfg).items():
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


@cache
def bubblewrap_failure() -> str:
    """Return why bubblewrap cannot make a sandbox here, and what to do; empty when it can."""
    if shutil.which("bwrap") is None:
        return (
            "needs the program bwrap, which is not installed; on Debian, Ubuntu and Fedora it is the package "
            "bubblewrap"
        )
    try:
        done = subprocess.run(_TRIAL, capture_output=True, timeout=_TRIAL_TIMEOUT_S, check=False)
        reason = done.stderr.decode(errors="replace").strip() or f"exit code {done.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"needs bubblewrap, which does not start here: {error}"
    if done.returncode == 0:
        return ""
    return (
        f"needs bubblewrap to make namespaces, which the system does not permit ({reason}); permit user "
        "namespaces, or in a container the capability SYS_ADMIN"
    )
