"""Answers arguments of ``GRPO`` that do not exist with what they are called here.

Names of other frameworks come from the tables of ``config/frameworks``; most are keys of the configuration.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import wraps
from typing import Any, ParamSpec, TypeVar

from nemo_like.config import fields
from nemo_like.config.other_frameworks import KnownName, Missing, known_name, our_keys, table_of
from nemo_like.config.problems import ConfigError, Problem
from nemo_like.configuration import Config

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

# The keys whose values are arguments.
_ARGUMENTS = {"grpo.max_num_steps": "num_steps", "policy.model_name": "model"}
# The least similarity of a spelling that counts as close; equal spellings have 1.
_CLOSE = 0.75


def answers_other_names(make: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Let a function raise ConfigError, which says what was probably meant, for arguments that it lacks."""
    names = [name for name in inspect.signature(make).parameters if name != "self"]

    @wraps(make)
    def checked(*args: _Parameters.args, **kwargs: _Parameters.kwargs) -> _Result:
        if unknown := {name: value for name, value in kwargs.items() if name not in names}:
            raise ConfigError([_problem(name, value, names) for name, value in unknown.items()])
        return make(*args, **kwargs)

    return checked


def _problem(name: str, value: Any, names: list[str]) -> Problem:
    theirs = table_of("trl").arguments
    if name in theirs:
        return _known(KnownName("TRL", name, theirs[name]), value, names)
    if known := known_name(name):
        return _known(known, value, names)
    rule = "is no argument"
    if close := get_close_matches(name, [*names, *theirs], n=1, cutoff=_CLOSE):
        meant = KnownName("TRL", close[0], theirs.get(close[0], close[0])).here
        return Problem(key=name, rule=rule, remedy=f"did you mean {meant}?")
    if key := fields.nearest_key(Config, name):
        return Problem(key=name, rule=rule, remedy=f"did you mean {_overrides([key], value)}?")
    remedy = f"there are {', '.join(names)}; all other settings are keys in overrides"
    return Problem(key=name, rule=rule, remedy=remedy)


def _known(known: KnownName, value: Any, names: list[str]) -> Problem:
    """Return the problem of an argument that is a name of another framework."""
    if known.here in names:
        return Problem(key=known.name, rule=f"is called {known.here} here", remedy="")
    ends = our_keys(known.entry)
    if not ends:
        remedy = "" if isinstance(known.entry, Missing) else "leave it out"
        return Problem(key="", rule=str(known), remedy=remedy)
    how = f" ({ends[0].how})" if ends[0].how else ""
    if argument := _ARGUMENTS.get(ends[0].key):
        return Problem(key=known.name, rule=f"is called {argument} here{how}", remedy="")
    if isinstance(known.entry, str) and "=" in known.entry:
        key, _, setting = known.entry.partition("=")
        return Problem(
            key=known.name, rule=f"is {known.entry} here", remedy=f"give {_overrides([key], setting)}"
        )
    keys, shown = [end.key for end in ends], ... if how else value
    rule = f"is {' and '.join(keys)} here{how}"
    return Problem(key=known.name, rule=rule, remedy=f"give {_overrides(keys, shown)}")


def _overrides(keys: Sequence[str], value: Any) -> str:
    shown = repr(value) if isinstance(value, str | int | float) else "..."
    return f"overrides={{{', '.join(f'{key!r}: {shown}' for key in keys)}}}"
