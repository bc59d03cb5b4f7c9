"""Arithmetic inside YAML, ``${mul:${grpo.num_prompts_per_step},8}``; also ``add``, ``sub`` and ``div``.

OmegaConf's ``oc.env`` is replaced by one that also records which variables were read.
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
    """Yield a list that gets the environment variables read by interpolations inside the ``with`` block."""
    names: list[str] = []
    before = _read.set(names)
    try:
        yield names
    finally:
        _read.reset(before)


def _environment_variable(name: str, *default: Any) -> str | None:
    """Return an environment variable or the default, as OmegaConf's ``oc.env`` does, and record its name."""
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
    """Return the quotient, which is an integer for two integers.

    Raises ValueError when the divisor is 0, and when it is an integer that does not divide the integer
    dividend.
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
