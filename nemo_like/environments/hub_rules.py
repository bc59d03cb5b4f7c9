"""Rules on environments of hubs: packages that offer many environments."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache

from nemo_like.config.keys import Key
from nemo_like.config.problems import Problem
from nemo_like.environments.kind import Kind
from nemo_like.environments.options import EnvConfig
from nemo_like.environments.registry import kind_of
from nemo_like.environments.shared_options import HubOptions

_LOOK_TIMEOUT_S = 60.0
_SETUP = "bash scripts/setup.sh --hubs makes .venv-hubs with all packages of hubs"


def hub_kind(
    *,
    about: str,
    reward: str,
    example: str,
    options: type[HubOptions],
    base: Mapping[str, Key],
    problems: Callable[[str, Mapping[str, EnvConfig]], Iterator[Problem]] | None = None,
) -> Kind:
    """Return the description of a hub's kind, with the fields that all hubs share."""
    return Kind(
        about=about,
        reward=reward,
        example=example,
        options=options,
        base=base,
        judge="nemo_like.environments.hub:HubEnvironment",
        answers=True,
        record_check="nemo_like.environments.record_needs:episode",
        problems=problems,
        machine_problems=package_problems,
        max_processes=2,  # each loads the package
    )


def has_interpreter(env: EnvConfig) -> bool:
    """Return whether the interpreter with a hub's package is on this machine."""
    python = env.options.get("python")
    return python is None or shutil.which(str(python)) is not None


def package_problems(name: str, env: EnvConfig) -> Iterator[Problem]:
    """Yield a problem when this machine has no interpreter with the hub's package."""
    options: type[HubOptions] = kind_of(env).options
    python, module = env.options.get("python"), options.module
    key = f"env.{name}.options.python={python}"
    if python is None:
        if not _has_module(sys.executable, module):
            yield Problem(
                key=f"env.{name}.kind={env.kind}",
                rule=f"needs the Python package {module}, which this interpreter does not have",
                remedy=f"install it, or name another interpreter in options.python; {_SETUP}",
            )
    elif not has_interpreter(env):
        yield Problem(key=key, rule="is no Python interpreter here", remedy=_SETUP)
    elif not _has_module(str(python), module):
        yield Problem(
            key=key,
            rule=f"does not have the Python package {module}, which kind={env.kind} needs",
            remedy=f"install it there; {_SETUP}",
        )


@cache
def _has_module(python: str, module: str) -> bool:
    """Return whether an interpreter finds a module's top package, without importing it."""
    top = module.partition(".")[0]
    look = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({top!r}) is None)"
    command = [python, "-P", "-c", look]
    ended = subprocess.run(command, check=False, timeout=_LOOK_TIMEOUT_S, capture_output=True, env={})
    return ended.returncode == 0
