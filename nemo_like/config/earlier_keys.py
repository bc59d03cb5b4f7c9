"""Reads files that an earlier version of this framework wrote, such as the ``config.yaml`` of a run.

A renamed key in a file is read under its present name; on the command line it is an error that says the
present name. A file that has every group, as a run writes it, gets the defaults of keys that are newer than
the file. Each change is noted on stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from nemo_like.config import fields
from nemo_like.config.keys import MISSING
from nemo_like.config.other_frameworks import Entry, our_keys, table_of


def with_todays_keys(tree: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the tree of the file ``where`` with each earlier key replaced by its present name.

    A key that has no effect any more is dropped. Where the file has a key under both names, the present name
    wins.
    """
    content, found = _copied(tree), dict[str, list[str]]()
    for key, entry in table_of("earlier").keys.items():
        *parents, name = key.split(".")
        group: Any = content
        for parent in parents:
            group = group.get(parent) if isinstance(group, dict) else None
        if isinstance(group, dict) and name in group:
            _replace(content, group.pop(name), entry)
            found.setdefault(_now(entry), []).append(key)
    for now, keys in found.items():
        note(f"{where}: of an earlier version, {now}: {', '.join(keys)}")
    return content


def newer_keys(
    tree: Mapping[str, Any], root: type, where: str, default_of: Callable[[str], Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the defaults of the keys that a file written by an earlier version lacks, for the groups that it
    has.

    ``tree`` is the content of the file ``where``. ``default_of`` returns the keys of a shipped file, such as
    "policy/default". Returns an empty dict when the file lacks a group that every configuration needs: then a
    person wrote the file, and a missing key was forgotten.
    """
    groups = fields.hints(root)
    needed = (name for name, kind in groups.items() if fields.is_group(kind))
    if not all(isinstance(tree.get(name), Mapping) for name in needed):
        return {}
    newer: dict[str, Any] = {}
    for name, kind in groups.items():
        has = tree.get(name)
        if not isinstance(has, Mapping):
            continue
        if entry := fields.entry_group(kind):
            of_all, by_entry = default_of(f"{name}/default"), dict[str, Any]()
            for key, inner in has.items():
                if isinstance(inner, Mapping):
                    own = {**of_all, **default_of(f"{name}/{inner.get('kind')}")}
                    by_entry[key] = _lacking(inner, own, entry, f"{where}: {name}.{key}")
            newer[name] = {key: lacking for key, lacking in by_entry.items() if lacking}
        elif fields.is_group(group := fields.without_none(kind)):
            newer[name] = _lacking(has, default_of(f"{name}/default"), group, f"{where}: {name}")
    return {name: lacking for name, lacking in newer.items() if lacking}


def _lacking(has: Mapping[str, Any], defaults: Mapping[str, Any], group: type, where: str) -> dict[str, Any]:
    lacking: dict[str, Any] = {}
    for name, kind in fields.hints(group).items():
        if name not in has and defaults.get(name, MISSING) != MISSING:
            lacking[name] = defaults[name]
            note(f"{where}.{name} is newer than this file, and has its default, {defaults[name]}")
        elif fields.is_group(kind) and isinstance(inner := has.get(name), Mapping):
            lacking[name] = _lacking(inner, defaults.get(name, {}), kind, f"{where}.{name}")
    return {name: value for name, value in lacking.items() if value != {} or name not in has}


def _copied(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _copied(value) if isinstance(value, Mapping) else value for name, value in tree.items()}


def _replace(content: dict[str, Any], value: Any, entry: Entry) -> None:
    """Set each present key of an entry to ``value``, unless the file sets that key itself."""
    for here in our_keys(entry):
        *parents, name = here.key.split(".")
        for parent in parents:
            content = content.setdefault(parent, {})
        content.setdefault(name, value)


def _now(entry: Entry) -> str:
    keys = " and ".join(here.key for here in our_keys(entry))
    return f"read as {keys}" if keys else f"left out since {getattr(entry, 'why', '')}"


@cache
def note(text: str) -> None:
    """Write a note to stderr; the same text is written once per process."""
    sys.stderr.write(f"note: {text}\n")
