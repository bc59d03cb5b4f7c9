"""Finds out whether this machine can make sandboxes with bubblewrap; reports it as a problem when not."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from functools import cache

from nemo_like.config.problems import Problem
from nemo_like.environments.options import EnvConfig
from nemo_like.environments.shared_options import SandboxMode
from nemo_like.observability.exits import how_it_ended

_TRIAL = ("bwrap", "--unshare-pid", "--unshare-net", "--ro-bind", "/", "/", "--proc", "/proc", "true")


_TRIAL_TIMEOUT_S = 30.0


@cache
def bubblewrap_failure() -> str:
    """Return why bubblewrap cannot make a sandbox here, and the remedy; empty when it can."""
    if shutil.which("bwrap") is None:
        return (
            "needs the program bwrap, which is not installed; on Debian, Ubuntu and Fedora it is the package "
            "bubblewrap"
        )
    try:
        done = subprocess.run(_TRIAL, capture_output=True, timeout=_TRIAL_TIMEOUT_S, check=False)
        reason = done.stderr.decode(errors="replace").strip() or how_it_ended(done.returncode)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"needs bubblewrap, which does not start here: {error}"
    if done.returncode == 0:
        return ""
    return (
        f"needs bubblewrap to make namespaces, which the system does not permit ({reason}); permit user "
        "namespaces, or in a container the capability SYS_ADMIN"
    )


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
