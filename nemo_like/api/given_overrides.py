"""Writes the overrides that a program gives as a dictionary as arguments, as ``run_grpo.py`` takes them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_like.api.base_configuration import quoted
from nemo_like.config.problems import ConfigError

Overrides = Sequence[str] | Mapping[str, Any]

# What Hydra's grammar lets stand for itself in the key of a dictionary only after a backslash.
_SPECIAL_IN_KEYS = re.compile(r"[\\()\[\]{}:=, \t]")


def override_texts(overrides: Overrides) -> tuple[str, ...]:
    """Return overrides, a list of arguments or a dictionary of keys and values, as arguments.

    The dictionary may be nested, and its keys may have dots; a text in it stands for itself. Raises
    ConfigError for a value that no configuration can hold.
    """
    if isinstance(overrides, str):
        raise ConfigError.of("overrides", "is a text", f"give a list: [{overrides!r}]")
    if isinstance(overrides, Mapping):
        return tuple(_arguments("", overrides))
    if isinstance(overrides, Sequence) and all(isinstance(text, str) for text in overrides):
        return tuple(overrides)
    raise ConfigError.of(
        f"overrides={overrides!r}",
        "is neither a list of texts nor a dict",
        "write ['policy.optimizer.lr=1e-5'] or {'policy.optimizer.lr': 1e-5}",
    )


def _arguments(prefix: str, overrides: Mapping[Any, Any]) -> Iterator[str]:
    for name, value in overrides.items():
        if not isinstance(name, str):
            raise ConfigError.of(f"overrides: {prefix}{name!r}", "is no text, and keys are texts")
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _arguments(f"{key}.", value)
        else:
            yield f"{key}={_written(key, value)}"


def _written(key: str, value: Any) -> str:
    """Return a value of the key ``key`` as Hydra's grammar has it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        return repr(float(value))
    if isinstance(value, str | Path):
        return quoted(str(value))
    if isinstance(value, list | tuple):
        return f"[{', '.join(_written(f'{key}[{index}]', item) for index, item in enumerate(value))}]"
    if isinstance(value, Mapping):
        pairs = (f"{_key(name)}: {_written(f'{key}.{name}', item)}" for name, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    raise ConfigError.of(
        f"overrides: {key}",
        f"is {type(value).__name__}, which no configuration can hold",
        "give a text, a number, True, False, None, or a list or a dict of these",
    )


def _key(name: object) -> str:
    return _SPECIAL_IN_KEYS.sub(r"\\\g<0>", str(name))
