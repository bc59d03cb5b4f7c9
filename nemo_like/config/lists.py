"""Completes lists of groups, such as ``data.train``.

A file may write a single group instead of a list of one. Keys that a group in the list leaves out come from
the group ``default`` beside the list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_like.config import fields

_DEFAULT = "default"


def complete_lists(tree: dict[str, Any], group: type) -> None:
    """Fill in the keys that the groups of every list leave out, in ``tree`` itself.

    ``tree`` holds the plain, unresolved values of ``group``.
    """
    for name, annotation in fields.hints(group).items():
        value = tree.get(name)
        if fields.is_group(annotation) and isinstance(value, dict):
            complete_lists(value, annotation)
        elif fields.item_group(annotation) and isinstance(default := tree.get(_DEFAULT), dict):
            if isinstance(value, Mapping):
                tree[name] = {**default, **value}
            elif isinstance(value, list):
                tree[name] = [{**default, **item} for item in value]


def make_lists(tree: dict[str, Any], group: type) -> None:
    """Replace each single group that stands where a list belongs by a list of one, and null by an empty list,
    in ``tree`` itself."""
    for name, annotation in fields.hints(group).items():
        value = tree.get(name)
        if fields.is_group(annotation) and isinstance(value, dict):
            make_lists(value, annotation)
        elif fields.item_group(annotation) and name in tree and isinstance(value, Mapping | None):
            tree[name] = [] if value is None else [value]


def single_groups(tree: Mapping[str, Any], group: type) -> dict[str, Any]:
    """Return a copy in which each list of one group is just the group, so that arguments reach its keys."""
    plain = dict(tree)
    for name, annotation in fields.hints(group).items():
        value = plain.get(name)
        if fields.is_group(annotation) and isinstance(value, Mapping):
            plain[name] = single_groups(value, annotation)
        elif fields.item_group(annotation) and isinstance(value, list) and len(value) == 1:
            (plain[name],) = value
    return plain
