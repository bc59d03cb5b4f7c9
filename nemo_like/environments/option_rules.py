"""Rules on the options of an environment's kind."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from typing import Any

from nemo_like.config.kind_options import kind_option_problems
from nemo_like.config.problems import Problem
from nemo_like.environments.options import EnvConfig
from nemo_like.environments.registry import kind_of

_IMPORT_PATHS = ("function", "target", "opponent", "agent")


def option_problems(name: str, env: EnvConfig) -> Iterator[Problem]:
    """Yield every problem with the options of the environment ``name``."""
    described = kind_of(env)
    prefix, kind, options = f"env.{name}.options", described.options, env.options
    wrong = kind_option_problems(prefix, options, kind, f"kind={env.kind}", f"configs/env/{env.kind}.yaml")
    yield from wrong
    if not wrong:
        yield from _value_problems(prefix, options)
    if described.package is not None:
        yield from _module_problems(name, env, *described.package)


def _value_problems(prefix: str, options: dict[str, Any]) -> Iterator[Problem]:
    for key, value in options.items():
        full_key = f"{prefix}.{key}={value}"
        if key.endswith("pattern") and value is not None:
            yield from _pattern_problems(full_key, key, value)
        elif key in ("url", "base_url") and not str(value).startswith(("http://", "https://")):
            yield Problem(key=full_key, rule="must start with http:// or https://", remedy="")
        elif key in _IMPORT_PATHS and value is not None and ":" not in str(value):
            yield Problem(key=full_key, rule="is no import path", remedy="write package.module:name")
        elif key == "result_template" and "{result}" not in str(value):
            yield Problem(key=full_key, rule="must contain {result}", remedy='for example "= {result}"')


def _pattern_problems(full_key: str, key: str, pattern: str) -> Iterator[Problem]:
    try:
        num_groups = re.compile(pattern).groups
    except re.error as error:
        yield Problem(key=full_key, rule=f"is no regular expression: {error}", remedy="")
        return
    if key != "pattern" and num_groups < 1:
        yield Problem(
            key=full_key, rule="has no group 1", remedy="put parentheses around the part that is wanted"
        )


def _module_problems(name: str, env: EnvConfig, module: str, package: str) -> Iterator[Problem]:
    if importlib.util.find_spec(module) is None:
        yield Problem(
            key=f"env.{name}.kind={env.kind}",
            rule=f"needs the Python package {module}, which is not installed",
            remedy=f"pip install '{package}'",
        )
