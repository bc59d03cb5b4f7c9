"""Arithmetic inside YAML, ``${mul:${grpo.num_prompts_per_step},8}``; also ``add``, ``sub`` and ``div``.

OmegaConf's own ``oc.env`` is one that tells what it has read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from omegaconf import OmegaConf
from omegaconf.resolvers import oc

Number = int | float

_read: ContextVar[list[str] | None] = ContextVar("read", default=None)


def register_resolvers() -> None:
    """Register the resolvers with OmegaConf; a second call does no harm."""
    arithmetic = {"add": _add, "sub": _sub, "mul": _mul, "div": _div}
    resolvers: dict[str, Callable[..., Any]] = {**arithmetic, "oc.env": _environment_variable}
    for name, function in resolvers.items():
        OmegaConf.register_new_resolver(name, function, replace=True)


@contextmanager
def environment_reads() -> Iterator[list[str]]:
    """Yield a list that gets the name of each environment variable which is read to resolve an interpolation
    within the block."""
    names: list[str] = []
    before = _read.set(names)
    try:
        yield names
    finally:
        _read.reset(before)


def _environment_variable(name: str, *default: Any) -> str | None:
    """Return an environment variable, or else a default, as OmegaConf's ``oc.env`` does."""
    if (names := _read.get()) is not None:
        names.append(name)
    return oc.env(name, *default)


def _numbers(name: str, values: tuple[Any, ...], count: int | None) -> tuple[Number, ...]:
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(
                f"${{{name}:...}} takes numbers, not {value!r}; write a key as ${{{name}:${{group.key}},2}}"
            )
    if count is not None and len(values) != count:
        raise ValueError(f"${{{name}:...}} takes {count} numbers, not {len(values)}")
    return values


def _add(*values: Any) -> Number:
    return sum(_numbers("add", values, None))


def _mul(*values: Any) -> Number:
    return math.prod(_numbers("mul", values, None))


def _sub(*values: Any) -> Number:
    first, second = _numbers("sub", values, 2)
    return first - second


def _div(*values: Any) -> Number:
    """Return the quotient; that of two integers is an integer.

    Raises ValueError when the divisor is 0 or, of two integers, does not divide the dividend.
    """
    dividend, divisor = _numbers("div", values, 2)
    if divisor == 0:
        raise ValueError(f"${{div:{dividend},{divisor}}} divides by zero")
    if isinstance(dividend, int) and isinstance(divisor, int):
        if dividend % divisor:
            raise ValueError(
                f"${{div:{dividend},{divisor}}} is not an integer; {divisor} must divide {dividend}"
            )
        return dividend // divisor
    return dividend / divisor
