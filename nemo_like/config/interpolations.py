"""Finds interpolations, such as ``${grpo.seed}`` and ``${oc.env:HOME}``, among a configuration's values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, get_args, get_origin

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_like.config import fields

KeyPath = tuple[str | int, ...]  # names of keys, and indexes of lists


def texts(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yield (path, text) of every text in ``value``, which stands at ``path`` in a configuration."""
    if isinstance(value, Mapping):
        for name, inner in value.items():
            yield from texts(inner, (*path, name))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from texts(inner, (*path, index))
    elif isinstance(value, str):
        yield path, value


def interpolations(value: Any, path: KeyPath = ()) -> Iterator[tuple[KeyPath, str]]:
    """Yield (path, text) of every interpolation in ``value``, which stands at ``path``."""
    return ((at, text) for at, text in texts(value, path) if fields.is_interpolation(text))


def full_key(path: KeyPath) -> str:
    """Return the full key of a path, such as "data.train[0].path"."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def values_of_texts(tree: Mapping[str, Any], resolved: Mapping[str, Any], group: type) -> dict[str, Any]:
    """Return the resolved values with the text of each interpolation read as YAML where its key takes no
    text.

    So ``lr: ${oc.env:LR}`` becomes a number, although a variable is a text. ``tree`` holds the values before
    resolution, and ``group`` is their class.
    """
    return {
        name: _value(tree.get(name), value, fields.hints_of_kinds(group).get(name))
        for name, value in resolved.items()
    }


def _value(before: Any, after: Any, annotation: Any) -> Any:
    kind = fields.without_none(annotation)
    if isinstance(after, Mapping) and isinstance(before, Mapping):
        group = kind if fields.is_group(kind) else fields.item_group(kind)
        if group is not None:
            return values_of_texts(before, after, group)
        entry = get_args(kind)[1] if get_origin(kind) is dict else None
        return {name: _value(before.get(name), value, entry) for name, value in after.items()}
    if isinstance(after, list) and isinstance(before, list):
        item = get_args(kind)[0] if get_origin(kind) is list else None
        return [_value(*pair, item) for pair in zip(before, after, strict=True)]
    takes_text = kind in (str, Any, None)
    if takes_text or not isinstance(after, str) or not fields.is_interpolation(before):
        return after
    try:
        read = OmegaConf.create({"text": after, "value": "${oc.decode:${text}}"}).value
    except OmegaConfBaseException:
        return after
    return OmegaConf.to_container(read) if OmegaConf.is_config(read) else read
