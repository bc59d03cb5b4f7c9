"""Keys of an earlier version of this framework in files, such as the ``config.yaml`` of a run: they are read
as what they are now, with a note on stderr. As arguments they are errors that say so."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

from nemo_like.config.other_frameworks import Entry, heres, table_of


def with_todays_keys(tree: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return the tree of a file, called ``where``, with today's keys in the place of earlier ones. A key that
    has no effect any more is left out, and one that the file also has by its name of today stays."""
    content = _copied(tree)
    for key, entry in table_of("earlier").keys.items():
        *parents, name = key.split(".")
        group: Any = content
        for parent in parents:
            group = group.get(parent) if isinstance(group, dict) else None
        if isinstance(group, dict) and name in group:
            _replace(content, group.pop(name), entry)
            _note(f"{where}: {key} of an earlier version {_now(entry)}")
    return content


def _copied(tree: Mapping[str, Any]) -> dict[str, Any]:
    return {name: _copied(value) if isinstance(value, Mapping) else value for name, value in tree.items()}


def _replace(content: dict[str, Any], value: Any, entry: Entry) -> None:
    """Give each key that the entry leads to the value, unless the file says another."""
    for here in heres(entry):
        *parents, name = here.key.split(".")
        for parent in parents:
            content = content.setdefault(parent, {})
        content.setdefault(name, value)


def _now(entry: Entry) -> str:
    keys = " and ".join(here.key for here in heres(entry))
    return f"is read as {keys}" if keys else f"is left out: {getattr(entry, 'why', '')}"


@cache
def _note(text: str) -> None:
    """Write a note once in the life of the process."""
    sys.stderr.write(f"note: {text}\n")
