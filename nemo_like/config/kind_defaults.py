"""The defaults of a kind's own keys, where a configuration names the kind and leaves them out."""

from __future__ import annotations

from copy import deepcopy
from enum import Enum
from typing import Any

from nemo_like.config import fields
from nemo_like.config.keys import MISSING, Key, keys


def fill_kinds(tree: Any, group: type) -> None:
    """Give every key of a named kind that ``tree`` lacks its default; changes ``tree`` itself.

    ``tree`` holds the plain, resolved values of ``group``. A kind that cannot be loaded brings none.
    """
    if not isinstance(tree, dict):
        return
    for name, (annotation, key) in keys(group).items():
        value, inner = tree.get(name), fields.without_none(annotation)
        if fields.is_group(inner):
            fill_kinds(value, inner)
        elif (entry := fields.entry_group(inner)) and isinstance(value, dict):
            for named in value.values():
                fill_kinds(named, entry)
        elif (item := fields.item_group(inner)) and isinstance(value, list):
            for listed in value:
                fill_kinds(listed, item)
        elif key.kinds and isinstance(value, str) and key.kinds.problem(name, value) is None:
            into = tree.setdefault(key.kinds.into, {}) if key.kinds.into else tree
            if isinstance(into, dict):
                _fill(into, key.kinds.load(value).options)


def _fill(tree: dict[str, Any], options: type) -> None:
    for name, (_, key) in keys(options).items():
        if key.default != MISSING:
            tree.setdefault(name, _plain(key))


def _plain(key: Key) -> Any:
    return key.default.name if isinstance(key.default, Enum) else deepcopy(key.default)
