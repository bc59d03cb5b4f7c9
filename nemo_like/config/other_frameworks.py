"""What other frameworks call the keys of this one, for those who come from them.

``frameworks/*.yaml`` is the table of each framework. It gives each of their keys an entry:

- ``key``, the key that it is here, or ``key=value``, what the value true means here;
- ``{here: key, how: text, by: conversion, …}``, or a list of these, for a key whose value changes: ``how``
  says what becomes of it, and ``by`` names the function that computes it in a conversion, with its
  arguments;
- ``{always: values, why: text}`` where it always is so here, ``{no_effect: why}``, and ``{missing: why}``.

The names of NeMo-RL and verl are full keys; those of TRL (``GRPOConfig``, ``PPOConfig`` and ``ModelConfig``)
and OpenRLHF (arguments) have no groups. An earlier version of this framework counts as another. The same
tables feed scripts/convert_config.py and the pages docs/from_*.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

# By the names of their files, in the order in which they are asked.
FRAMEWORKS = ("earlier", "nemo_rl", "verl", "trl", "openrlhf")
_FOLDER = Path(__file__).parent / "frameworks"
# The conversion of a value that stays as it is.
UNCHANGED = "unchanged"
# Of 1, for equal spelling.
_CLOSE = 0.85


@dataclass(frozen=True, slots=True)
class Here:
    """The key that it is here. ``how`` says what becomes of the value, and is empty where it stays; ``by``
    names the conversion that computes it, and ``arguments`` has the arguments of that function."""

    key: str
    how: str = ""
    by: str = UNCHANGED
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Always:
    """Here it always has one of these ``values``; ``why`` says so, and what to do about another one."""

    values: Sequence[Any]
    why: str


@dataclass(frozen=True, slots=True)
class NoEffect:
    """It changes nothing that a run here computes."""

    why: str


@dataclass(frozen=True, slots=True)
class Missing:
    """There is nothing like it here; ``why`` says what to do instead. With the ``neutral`` values it asks for
    nothing."""

    why: str
    neutral: Sequence[Any]


# A text is a key whose value stays as it is, or key=value: what the value true means here.
Entry = str | tuple[Here, ...] | Always | NoEffect | Missing


@dataclass(frozen=True, slots=True)
class Switch:
    """Keys below ``group`` count only where the key ``by`` has one of ``values``."""

    group: str
    by: str
    values: Sequence[Any] = (True,)


@dataclass(frozen=True, slots=True)
class Habit:
    """The value that a key has here to do as they do without a key for it, and what that is."""

    value: Any
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """Another framework: the entries of its ``keys``; its ``habits``, by keys here; and ``rest``, what keys
    below a group mean that are not in the table, where the configuration here has that group too.

    With ``shares_names`` a key that is in both, and not in the table, means the same.
    """

    name: str
    keys: Mapping[str, Entry]
    switches: Sequence[Switch] = ()
    habits: Mapping[str, Habit] = field(default_factory=dict)
    shares_names: bool = False
    rest: Mapping[str, Entry] = field(default_factory=dict)


class KnownName(NamedTuple):
    """What a name of another framework is here."""

    framework: str
    name: str
    entry: Entry

    @property
    def here(self) -> str:
        """The key that it is here, or key=value; empty for none."""
        if isinstance(self.entry, str):
            return self.entry
        return next((each.key for each in heres(self.entry)), "")

    def __str__(self) -> str:
        return f"{self.framework}'s {self.name} {_told(self.entry)}"


@cache
def table_of(name: str) -> Framework:
    """Return the table of one of FRAMEWORKS."""
    given = yaml.load((_FOLDER / f"{name}.yaml").read_bytes(), yaml.CSafeLoader)
    return Framework(
        name=given["name"],
        keys={key: _entry(entry) for key, entry in given["keys"].items()},
        switches=[Switch(**switch) for switch in given.get("switches", ())],
        habits={key: Habit(**habit) for key, habit in given.get("habits", {}).items()},
        shares_names=given.get("shares_names", False),
        rest={key: _entry(entry) for key, entry in given.get("rest", {}).items()},
    )


def heres(entry: Entry) -> tuple[Here, ...]:
    """Return the keys that an entry leads to; none for one that leads nowhere."""
    if isinstance(entry, str):
        key, equals, value = entry.partition("=")
        if not equals:
            return (Here(key),)
        return (Here(key, f"`{value}` where it is true", "either", {"then": value}),)
    return entry if isinstance(entry, tuple) else ()


def known_name(key: str) -> KnownName | None:
    """Return what ``key`` means to another framework: as it stands, by a group of theirs that has no
    counterpart, or by its last part where that is a name without groups; None when none has such a name."""
    for theirs in _frameworks():
        if key in theirs.keys:
            return KnownName(theirs.name, key, theirs.keys[key])
    for group in _groups(key):
        for theirs in _frameworks():
            if group in theirs.keys and not heres(theirs.keys[group]):
                return KnownName(theirs.name, group, theirs.keys[group])
    leaf = key.rpartition(".")[2]
    for theirs in _frameworks():
        if leaf in theirs.keys:
            return KnownName(theirs.name, leaf, theirs.keys[leaf])
    return None


def nearest_name(key: str) -> KnownName | None:
    """Return the name of another framework that is spelled most like ``key``, in full or without its groups,
    among those with a counterpart; None when none is close."""
    every = {name for theirs in _frameworks() for name, entry in theirs.keys.items() if heres(entry)}
    for word in (key, key.rpartition(".")[2]):
        if close := get_close_matches(word, every, n=1, cutoff=_CLOSE):
            return known_name(close[0])
    return None


def has_names_below(key: str) -> bool:
    """Return whether a framework has a group of this name that the configuration here lacks."""
    return any(name.startswith(f"{key}.") for theirs in _frameworks() for name in theirs.keys)


def _frameworks() -> Iterator[Framework]:
    return map(table_of, FRAMEWORKS)


def _entry(given: Any) -> Entry:
    """Return an entry as the table writes it down."""
    if isinstance(given, str):
        return given
    if isinstance(given, list):
        return tuple(_here(each) for each in given)
    if "here" in given:
        return (_here(given),)
    if "always" in given:
        return Always(given["always"], given["why"])
    if "no_effect" in given:
        return NoEffect(given["no_effect"])
    return Missing(given["missing"], given.get("neutral", (None, False)))


def _here(given: Mapping[str, Any]) -> Here:
    arguments = dict(given)
    return Here(arguments.pop("here"), arguments.pop("how", ""), arguments.pop("by", UNCHANGED), arguments)


def _told(entry: Entry) -> str:
    """Return what an entry says, as the end of a sentence about the key."""
    if isinstance(entry, str):
        return f"is {entry} here"
    if isinstance(entry, Always):
        return f"is always so here: {entry.why}"
    if isinstance(entry, NoEffect):
        return f"has no effect here: {entry.why}"
    if isinstance(entry, Missing):
        return f"is missing here: {entry.why}"
    return f"is {heres(entry)[0].key} here"


def _groups(key: str) -> Iterator[str]:
    """Yield the groups of a key, the innermost first."""
    while "." in key:
        key = key.rpartition(".")[0]
        yield key
