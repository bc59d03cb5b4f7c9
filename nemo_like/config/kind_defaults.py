"""Fills in defaults of the keys that named kinds bring, and deals with keys of kinds that are not named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from enum import Enum
from typing import Any

from nemo_like.config import fields
from nemo_like.config.earlier_keys import note
from nemo_like.config.import_path import load_by_path
from nemo_like.config.keys import MISSING, Key, keys
from nemo_like.config.kinds import Kinds
from nemo_like.config.problems import Problem

# Called with the full key of a key that kinds bring, the full key that names the kind, and the kind's name.
WasReplaced = Callable[[str, str, str], bool]


def fill_kinds(tree: Any, group: type, was_replaced: WasReplaced, prefix: str = "") -> list[Problem]:
    """Give every key of a named kind that ``tree`` lacks its default, in ``tree`` itself; return the
    problems.

    ``tree`` holds the plain, resolved values of ``group``, whose full key is ``prefix`` (with its dot). A key
    that kinds have replaced is rewritten, with a note. A key of a kind that is not named is removed, with a
    note, when ``was_replaced`` says that a file set it before another kind was named; otherwise it is a
    problem. A kind that cannot be loaded is skipped.
    """
    if not isinstance(tree, dict):
        return []
    found: list[Problem] = []
    for name, (annotation, key) in keys(group).items():
        value, inner, full = tree.get(name), fields.without_none(annotation), f"{prefix}{name}"
        if fields.is_group(inner):
            found += fill_kinds(value, inner, was_replaced, f"{full}.")
        elif (entry := fields.entry_group(inner)) and isinstance(value, dict):
            for named, keys_of_it in value.items():
                found += fill_kinds(keys_of_it, entry, was_replaced, f"{full}.{named}.")
        elif (item := fields.item_group(inner)) and isinstance(value, list):
            for index, listed in enumerate(value):
                found += fill_kinds(listed, item, was_replaced, f"{full}[{index}].")
        elif key.kinds and isinstance(value, str):
            found += _of_named(tree, name, key.kinds, group, prefix, was_replaced)
    return found


def _of_named(
    tree: dict[str, Any],
    name: str,
    kinds: Kinds,
    group: type,
    prefix: str,
    was_replaced: WasReplaced,
) -> list[Problem]:
    named = tree[name]
    if kinds.earlier:
        for sentence in load_by_path(kinds.earlier).replace(tree):
            note(sentence)
    if not kinds.has_keys or kinds.problem(name, tree[name]) is not None:
        return []
    options: type = kinds.load(tree[name]).options
    if kinds.into:
        _fill(tree.setdefault(kinds.into, {}), keys(options))
        return []
    known, of_any = fields.hints(options), fields.hints_of_kinds(group)
    _fill(tree, {key: what for key, what in keys(options).items() if key not in keys(group)})
    found, rule = [], f"is no key of {prefix}{name}={tree[name]}"
    for key, value in [item for item in tree.items() if item[0] in of_any and item[0] not in known]:
        # The argument ``~key`` leaves null.
        if value is not None and not was_replaced(f"{prefix}{key}", f"{prefix}{name}", named):
            found.append(Problem(key=f"{prefix}{key}={value}", rule=rule, remedy=_remedy(kinds, key)))
            continue
        del tree[key]
        if value not in (None, _default_of(kinds, key)):
            note(f"{prefix}{key}={value} is left out, since it {rule}")
    return found


def _default_of(kinds: Kinds, key: str) -> Any:
    """Return the default of a key that some shipped kind brings, as a plain value."""
    options = (kinds.load(name).options for name in kinds.names())
    return next((_plain(keys(one)[key][1]) for one in options if key in keys(one)), None)


def _remedy(kinds: Kinds, key: str) -> str:
    owners = [name for name in kinds.names() if key in fields.hints(kinds.load(name).options)]
    return f"leave it out; it belongs to {', '.join(owners)}" if owners else "leave it out, and choose a kind"


def _fill(tree: Any, own: Mapping[str, tuple[Any, Key]]) -> None:
    for name, (_, key) in own.items():
        if key.default != MISSING and isinstance(tree, dict):
            tree.setdefault(name, _plain(key))


def _plain(key: Key) -> Any:
    return key.default.name if isinstance(key.default, Enum) else deepcopy(key.default)
