"""``Columnar``: a list of dataclass instances that is pickled field by field."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter
from typing import Any, TypeVar

Item = TypeVar("Item")


class Columnar(list[Item]):
    """A list of dataclass instances that another process receives as a plain list.

    When all instances are of one class, pickle gets one tuple per field instead of the instances. Pickling
    hundreds of small dataclasses one by one takes longer than most work on them.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        kinds = set(map(type, self))
        if len(kinds) != 1:
            return list, (tuple(self),)
        (kind,) = kinds
        columns = tuple(tuple(map(attrgetter(field.name), self)) for field in fields(kind))
        return _restored_list, (kind, columns)


def _restored_list(kind: Callable[..., Item], columns: Sequence[Sequence[Any]]) -> list[Item]:
    return list(map(kind, *columns))
