"""What a key of another framework can be here. Standard library only.

A table gives each of their keys an entry: the key or keys that it is here, with what becomes of its value; or
that it is always so here, that it has no effect here, or that it is missing here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple


class Untranslatable(Exception):
    """A value of theirs has no counterpart; the text says why, and what to do instead."""


class LeftOut:
    """Stands for a value that is not set here, since another key says it or nothing asks for it."""


LEFT_OUT: Final = LeftOut()


class Noted(NamedTuple):
    """A value, with what whoever converts a configuration has to know of it."""

    value: Any
    note: str


class Theirs:
    """A configuration of another framework, as a tree of plain values without interpolations.

    ``texts`` reads a file that it names; None where there is no such file.
    """

    def __init__(
        self, tree: Mapping[str, Any], texts: Callable[[str], str | None] = lambda name: None
    ) -> None:
        self.tree, self.texts = tree, texts

    def __call__(self, key: str, default: Any = None) -> Any:
        """Return the value of a full key; ``default`` where it has none, or null."""
        value: Any = self.tree
        for part in key.split("."):
            if not isinstance(value, Mapping) or part not in value:
                return default
            value = value[part]
        return default if value is None or value == "???" else value


Convert = Callable[[Any, Theirs], Any]


def _as_it_is(value: Any, theirs: Theirs) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Here:
    """The key that it is here.

    ``how`` says what becomes of the value, and is empty where it stays. ``convert`` returns the value for
    here, or LEFT_OUT, or Noted; it raises Untranslatable.
    """

    key: str
    how: str = ""
    convert: Convert = _as_it_is


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
    """There is nothing like it here; ``why`` says what to do instead. With the values ``off`` it asks for
    nothing."""

    why: str
    off: Sequence[Any] = (None, False)


# A text is a key whose value stays as it is, or key=value: what the value true means here.
Entry = str | Here | tuple[Here, ...] | Always | NoEffect | Missing


@dataclass(frozen=True, slots=True)
class Switch:
    """Keys below ``group`` count only where the key ``by`` has one of ``values``."""

    group: str
    by: str
    values: Sequence[Any] = (True,)


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """Another framework: its ``keys``, and its ``habits``, what it does without a key for it, as values of
    keys here, each with the reason."""

    name: str
    keys: Mapping[str, Entry]
    switches: Sequence[Switch] = ()
    habits: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    shares_names: bool = False  # a key that is in both, and not in the table, means the same
    # What keys below a group mean that are not in the table, where the configuration here has that group too.
    rest: Mapping[str, Entry] = field(default_factory=dict)


def heres(entry: Entry) -> tuple[Here, ...]:
    """Return the keys that an entry leads to; none for one that leads nowhere."""
    if isinstance(entry, str):
        key, equals, value = entry.partition("=")
        return (Here(key, f"`{value}` where it is true", _switch(value)) if equals else Here(key),)
    if isinstance(entry, Here):
        return (entry,)
    return entry if isinstance(entry, tuple) else ()


def told(entry: Entry) -> str:
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


def _switch(value: str) -> Convert:
    return lambda is_on, theirs: value if is_on else LEFT_OUT
