"""Says what keys of other frameworks are called here, for people who come from these frameworks.

``frameworks/*.yaml`` has a table per framework. It gives each key of that framework an entry:

- ``key``, the key's name here, or ``key=value``, the setting here that means the same as the value true;
- ``{here: key, how: text, by: conversion, …}``, or a list of these, for a key whose value changes: ``how``
  says what becomes of the value, and ``by`` names the function that computes it in a conversion, with its
  arguments;
- ``{always: values, why: text}`` where a run here always does so, ``{no_effect: why}``, ``{missing: why}``.

The names of NeMo-RL and verl are full keys; the names of TRL (``GRPOConfig``, ``PPOConfig`` and
``ModelConfig``) and OpenRLHF (arguments) have no groups. An earlier version of this framework counts as
another framework. scripts/convert_config.py and the pages docs/reference/from_*.md use the same tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

# Names of the tables' files, in the order in which the tables are searched.
FRAMEWORKS = ("earlier", "nemo_rl", "verl", "trl", "openrlhf")
_FOLDER = Path(__file__).parent / "frameworks"
# The name of the conversion that returns a value unchanged.
UNCHANGED = "unchanged"
# The least similarity of a spelling that counts as close; equal spellings have 1.
_CLOSE = 0.85


@dataclass(frozen=True, slots=True)
class OurKey:
    """A key of this framework to which a key of another framework leads.

    ``how`` says what becomes of the value, and is empty when the value stays. ``by`` names the conversion
    that computes the value here, and ``arguments`` are the further arguments of that conversion.
    """

    key: str
    how: str = ""
    by: str = UNCHANGED
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Always:
    """A key whose behaviour is fixed here: only its ``values`` are possible.

    ``why`` says so, and what to do about another value.
    """

    values: Sequence[Any]
    why: str


@dataclass(frozen=True, slots=True)
class NoEffect:
    """A key that changes nothing that a run here computes."""

    why: str


@dataclass(frozen=True, slots=True)
class Missing:
    """A key without a counterpart here; ``why`` says what to do instead. ``neutral`` values need nothing."""

    why: str
    neutral: Sequence[Any]


# A text is a key whose value stays unchanged, or key=value, the setting that the value true means here.
Entry = str | tuple[OurKey, ...] | Always | NoEffect | Missing


@dataclass(frozen=True, slots=True)
class Switch:
    """A group of another framework that counts only when its key ``by`` has one of ``values``."""

    group: str
    by: str
    values: Sequence[Any] = (True,)


@dataclass(frozen=True, slots=True)
class Habit:
    """What another framework does without having a key for it: ``value`` makes a key here do the same."""

    value: Any
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """The table of another framework.

    ``keys`` has the entries of its keys, and ``habits`` its habits by key of this framework. ``rest`` has
    entries of groups, for the keys below them that neither ``keys`` nor this framework has. ``arguments`` has
    the arguments of its Python interface, which lead to arguments of ``GRPO`` or to keys. With
    ``shares_names``, a key outside the table that exists in both frameworks means the same in both.
    ``defaults`` has the values of its keys where nobody sets them; interpolations name other keys.
    """

    name: str
    keys: Mapping[str, Entry]
    switches: Sequence[Switch] = ()
    habits: Mapping[str, Habit] = field(default_factory=dict)
    shares_names: bool = False
    rest: Mapping[str, Entry] = field(default_factory=dict)
    arguments: Mapping[str, Entry] = field(default_factory=dict)
    defaults: Mapping[str, Any] = field(default_factory=dict)


class KnownName(NamedTuple):
    """A name that another framework uses, with its entry in the table of that framework."""

    framework: str
    name: str
    entry: Entry

    @property
    def here(self) -> str:
        """The key here, or key=value; empty when there is no counterpart."""
        if isinstance(self.entry, str):
            return self.entry
        return next((each.key for each in our_keys(self.entry)), "")

    def __str__(self) -> str:
        return f"{self.framework}'s {self.name} {_meaning(self.entry)}"


@cache
def table_of(name: str) -> Framework:
    """Read the table of one of FRAMEWORKS."""
    given = yaml.load((_FOLDER / f"{name}.yaml").read_bytes(), yaml.CSafeLoader)
    return Framework(
        name=given["name"],
        keys={key: _entry(entry) for key, entry in given["keys"].items()},
        switches=[Switch(**switch) for switch in given.get("switches", ())],
        habits={key: Habit(**habit) for key, habit in given.get("habits", {}).items()},
        shares_names=given.get("shares_names", False),
        rest={key: _entry(entry) for key, entry in given.get("rest", {}).items()},
        arguments={name: _entry(entry) for name, entry in given.get("arguments", {}).items()},
        defaults=given.get("defaults", {}),
    )


def our_keys(entry: Entry) -> tuple[OurKey, ...]:
    """Return the keys of this framework to which an entry leads; empty when it leads to none."""
    if isinstance(entry, str):
        key, equals, value = entry.partition("=")
        if not equals:
            return (OurKey(key),)
        return (OurKey(key, f"`{value}` where it is true", "either", {"then": value}),)
    return entry if isinstance(entry, tuple) else ()


def known_name(key: str) -> KnownName | None:
    """Return what ``key`` means to another framework; None when no framework has such a name.

    Tries in order: the full key; a group above it that has no counterpart here; its last part, for frameworks
    whose names have no groups.
    """
    for theirs in _frameworks():
        if key in theirs.keys:
            return KnownName(theirs.name, key, theirs.keys[key])
    for group in _groups(key):
        for theirs in _frameworks():
            if group in theirs.keys and not our_keys(theirs.keys[group]):
                return KnownName(theirs.name, group, theirs.keys[group])
    leaf = key.rpartition(".")[2]
    for theirs in _frameworks():
        if leaf in theirs.keys:
            return KnownName(theirs.name, leaf, theirs.keys[leaf])
    return None


def nearest_name(key: str) -> KnownName | None:
    """Return the name of another framework that is spelled most like ``key``, with or without its groups.

    Only names with a counterpart here count. Returns None when none is close.
    """
    every = {name for theirs in _frameworks() for name, entry in theirs.keys.items() if our_keys(entry)}
    for word in (key, key.rpartition(".")[2]):
        if close := get_close_matches(word, every, n=1, cutoff=_CLOSE):
            return known_name(close[0])
    return None


def has_names_below(key: str) -> bool:
    """Return whether some framework's table has keys below ``key``."""
    return any(name.startswith(f"{key}.") for theirs in _frameworks() for name in theirs.keys)


def _frameworks() -> Iterator[Framework]:
    return map(table_of, FRAMEWORKS)


def _entry(given: Any) -> Entry:
    """Return an entry of a table, read from its YAML."""
    if isinstance(given, str):
        return given
    if isinstance(given, list):
        return tuple(_our_key(each) for each in given)
    if "here" in given:
        return (_our_key(given),)
    if "always" in given:
        return Always(given["always"], given["why"])
    if "no_effect" in given:
        return NoEffect(given["no_effect"])
    return Missing(given["missing"], given.get("neutral", (None, False)))


def _our_key(given: Mapping[str, Any]) -> OurKey:
    arguments = dict(given)
    return OurKey(arguments.pop("here"), arguments.pop("how", ""), arguments.pop("by", UNCHANGED), arguments)


def _meaning(entry: Entry) -> str:
    """Return the meaning of an entry as the end of a sentence about the key."""
    if isinstance(entry, str):
        return f"is {entry} here"
    if isinstance(entry, Always):
        return f"is always so here: {entry.why}"
    if isinstance(entry, NoEffect):
        return f"has no effect here: {entry.why}"
    if isinstance(entry, Missing):
        return f"is missing here: {entry.why}"
    here = our_keys(entry)[0]
    return f"is {here.key} here{f' ({here.how})' if here.how else ''}"


def _groups(key: str) -> Iterator[str]:
    """Yield the groups that hold a dotted key, the innermost first: "a.b" and "a" for "a.b.c"."""
    while "." in key:
        key = key.rpartition(".")[0]
        yield key
