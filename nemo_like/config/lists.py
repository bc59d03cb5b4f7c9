"""Lists of groups, such as ``data.train``.

A single group may be written in place of a list of one. A group takes the keys that it leaves out from the
group ``default`` beside the list.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_like.config import fields

_DEFAULT = "default"


def complete_lists(tree: dict[str, Any], group: type) -> None:
    """Fill in, in place, the keys that the groups of every list leave out.

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
    """Put every group that is written instead of a list of one into such a list; changes ``tree`` itself."""
    for name, annotation in fields.hints(group).items():
        value = tree.get(name)
        if fields.is_group(annotation) and isinstance(value, dict):
            make_lists(value, annotation)
        elif fields.item_group(annotation) and isinstance(value, Mapping):
            tree[name] = [value]


def single_groups(tree: Mapping[str, Any], group: type) -> dict[str, Any]:
    """Return a copy in which every list of one group is that group, so that arguments can reach its keys."""
    plain = dict(tree)
    for name, annotation in fields.hints(group).items():
        value = plain.get(name)
        if fields.is_group(annotation) and isinstance(value, Mapping):
            plain[name] = single_groups(value, annotation)
        elif fields.item_group(annotation) and isinstance(value, list) and len(value) == 1:
            (plain[name],) = value
    return plain
