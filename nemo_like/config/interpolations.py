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


def with_values(tree: Mapping[str, Any], values: Mapping[KeyPath, Any], root: type) -> dict[str, Any]:
    """Return a copy of ``tree`` with the values of its interpolations, which are given by their paths.

    A text is read as YAML where its key takes no text. So ``lr: ${oc.env:LR}`` becomes a number, although a
    variable is a text. ``root`` is the class of the tree.
    """
    copied = {name: _copied(value) for name, value in tree.items()}
    for path, value in values.items():
        *parents, last = path
        holder: Any = copied
        for part in parents:
            holder = holder[part]
        holder[last] = _as_its_key_takes_it(value, _annotation(root, path))
    return copied


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _copied(inner) for name, inner in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value


def _annotation(root: type, path: KeyPath) -> Any:
    """Return the type of the value at a path; None where the schema has none for it."""
    annotation: Any = root
    for part in path:
        kind = fields.without_none(annotation)
        if isinstance(part, int):
            annotation = get_args(kind)[0] if get_origin(kind) is list else None
        elif group := kind if fields.is_group(kind) else fields.item_group(kind):
            annotation = fields.hints_of_kinds(group).get(part)
        else:
            annotation = get_args(kind)[1] if get_origin(kind) is dict else None
    return annotation


def _as_its_key_takes_it(value: Any, annotation: Any) -> Any:
    takes_text = fields.without_none(annotation) in (str, Any, None)
    if takes_text or not isinstance(value, str):
        return value
    try:
        read = OmegaConf.create({"text": value, "value": "${oc.decode:${text}}"}).value
    except OmegaConfBaseException:
        return value
    return OmegaConf.to_container(read) if OmegaConf.is_config(read) else read
