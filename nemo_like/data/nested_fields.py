"""Finds a field of a record by its name, which may lead into mappings: ``reward_model.ground_truth``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class NoField(Exception):
    """A record lacks a field: ``owner``, which is "it" or the name of a mapping inside, has ``names``."""

    def __init__(self, owner: str, names: list[str]) -> None:
        super().__init__(f"{owner} has {', '.join(names)}")
        self.owner, self.names = owner, names


def holder_of(record: Mapping[str, Any], key: str) -> tuple[Mapping[str, Any], str]:
    """Return the mapping that has the field ``key``, and the field's name there.

    A field whose own name has dots is found first. Raises NoField when there is none.
    """
    holder, owner, name = record, "it", key
    while name not in holder:
        group, _, rest = name.partition(".")
        inner = holder.get(group)
        if not rest or not isinstance(inner, Mapping):
            raise NoField(owner, sorted(holder))
        holder, owner, name = inner, repr(group), rest
    return holder, name
