"""Hydra's grammar of arguments: key=value, group@key=name, ~key, and sweeps such as key=1,2."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override

# Hydra's grammar has no ~ in a value; a shell leaves it there, since what is before it names no variable.
_PATH_FROM_HOME = re.compile(r"""([^=]+=)(~[^,"'\[\]{}()]*)""")


def parse(text: str, loader: ConfigLoader | None = None) -> Override:
    """Read an argument. ``loader`` finds the names of a pattern such as key=glob(*). A value may be a path
    that begins with ``~``.

    Raises HydraException when the text does not follow the grammar.
    """
    if found := _PATH_FROM_HOME.fullmatch(text):
        text = f'{found[1]}"{found[2]}"'
    return OverridesParser.create(loader).parse_override(text)


def alternatives(argument: Override) -> Iterator[Any]:
    """Yield the value of an argument, each value of a sweep, or the two ends of an interval."""
    if not argument.is_sweep_override():
        yield argument.value()
    elif isinstance(interval := argument.value(), IntervalSweep):
        yield from (interval.start, interval.end)
    elif argument.is_discrete_sweep():
        yield from (parse(f"key={text}").value() for text in argument.sweep_string_iterator())


def alternative_texts(argument: Override) -> list[str]:
    """Return one argument per value that the argument gives, as Hydra hands it to a job."""
    key = argument.get_key_element()
    if not argument.is_sweep_override():
        return [f"{key}={argument.get_value_element_as_str()}"]
    if isinstance(interval := argument.value(), IntervalSweep):
        return [f"{key}={interval.start}", f"{key}={interval.end}"]
    return [f"{key}={text}" for text in argument.sweep_string_iterator()]


def without_sweep(argument: Override) -> str:
    """Return an argument's text with the first of its alternatives only."""
    text = str(argument.input_line)
    if not argument.is_sweep_override():
        return text
    if isinstance(interval := argument.value(), IntervalSweep):
        return f"{text.partition('=')[0]}={interval.start}"
    return f"{text.partition('=')[0]}={next(argument.sweep_string_iterator())}"
