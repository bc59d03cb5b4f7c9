"""Answers questions about the schema: which keys exist, which values they take, what a mistyped key meant."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from enum import Enum
from functools import cache
from typing import Annotated, Any, TypeGuard, Union, get_args, get_origin, get_type_hints

from pydantic import GetCoreSchemaHandler, TypeAdapter, ValidationError, ValidatorFunctionWrapHandler
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_wrap_validator_function

from nemo_like.config.import_path import load_by_path
from nemo_like.config.keys import MISSING, Leaf, keys
from nemo_like.config.kinds import Kinds
from nemo_like.config.problems import Problem

_SCALAR_NAMES = {int: "an integer", float: "a number", bool: "true or false", str: "a string"}


@cache
def hints(group: type) -> dict[str, Any]:
    """Return the field names of a group of the schema, in order, with their types."""
    resolved = get_type_hints(group)
    return {field.name: resolved[field.name] for field in fields(group)}


@cache
def kinds_of(group: type) -> Kinds | None:
    """Return the kinds that put keys of their own into a group, beside the key that names one; else None."""
    name = _naming_key(group)
    return None if name is None else keys(group)[name][1].kinds


def _naming_key(group: type) -> str | None:
    """Return the key of a group that names a kind, if the kind's own keys stand beside it; else None."""
    found = (
        name
        for name, (annotation, key) in keys(group).items()
        if annotation is str and key.kinds and key.kinds.has_keys and not key.kinds.into
    )
    return next(found, None)


def hints_of_kinds(group: type) -> dict[str, Any]:
    """Return the fields of a group with their types, including the fields that its kinds bring.

    Shipped kinds and loaded kinds count, and so do keys that kinds have replaced.
    """
    kinds, found = kinds_of(group), _hints_of_shipped(group)
    for own in kinds.own() if kinds else ():
        found = {**hints(own.options), **found}
    return found


def load_kinds(tree: Any, group: type) -> None:
    """Load the kinds that ``tree``, plain values of ``group``, names, so that their keys are known.

    A kind that cannot be loaded is skipped here; the checks report it.
    """
    if not isinstance(tree, Mapping):
        return
    for name, (annotation, key) in keys(group).items():
        value, inner = tree.get(name), without_none(annotation)
        if is_group(inner):
            load_kinds(value, inner)
        elif item := item_group(inner):
            for one in value if isinstance(value, list) else [value]:
                load_kinds(one, item)
        elif key.kinds and isinstance(value, str):
            key.kinds.problem(name, value)


@cache
def _hints_of_shipped(group: type) -> dict[str, Any]:
    kinds = kinds_of(group)
    if kinds is None:
        return hints(group)
    found = {**hints(group)}
    if kinds.of_function:
        found |= hints(load_by_path(kinds.of_function)("package.module:function").options)
    for name in kinds.names():
        found |= hints(kinds.load(name).options)
    return found | (dict(load_by_path(kinds.earlier).types) if kinds.earlier else {})


def class_of_tree(group: type, tree: Mapping[str, Any]) -> type:
    """Return the class with the keys of ``tree``: the options of the kind that it names, else ``group``."""
    kinds, name = kinds_of(group), _naming_key(group)
    options = kinds.options_in(tree.get(name)) if kinds and name else None
    return group if options is None else options


def all_keys(group: type, prefix: str = "") -> Iterator[str]:
    """Yield the full key of every group and every value below ``group``."""
    for name, annotation in hints_of_kinds(group).items():
        yield prefix + name
        inner = without_none(annotation)
        below = inner if is_group(inner) else item_group(annotation)
        if below is not None:
            yield from all_keys(below, f"{prefix}{name}.")


def is_group(annotation: Any) -> TypeGuard[type]:
    """Return whether this type is a group of keys rather than a value."""
    return isinstance(annotation, type) and is_dataclass(annotation)


@cache
def entry_group(annotation: Any) -> type | None:
    """Return the class of the entries when the type is a mapping of names to groups; None for other types."""
    if get_origin(annotation) is dict and is_group(entry := get_args(annotation)[1]):
        return entry
    return None


@cache
def item_group(annotation: Any) -> type | None:
    """Return the class of the items when the type is a list of groups; None for other types.

    A file may write a list of one group as the group itself.
    """
    if get_origin(annotation) is list and is_group(item := get_args(annotation)[0]):
        return item
    return None


@cache
def is_optional(annotation: Any) -> bool:
    """Return whether null is a value of this type."""
    return type(None) in get_args(annotation)


def find(group: type, key: str) -> Any | None:
    """Return the type behind a full key; None when the schema has no such key.

    Below a free-form ``dict[str, T]`` every name exists.
    """
    annotation: Any = group
    for name in key.split("."):
        annotation = without_none(annotation)
        if is_group(annotation):
            annotation = hints_of_kinds(annotation).get(name)
        elif item := item_group(annotation):
            annotation = hints(item).get(name)
        elif get_origin(annotation) is dict:
            annotation = get_args(annotation)[1]
        elif annotation is not Any:
            return None
        if annotation is None:
            return None
    return annotation


def nearest_key(group: type, key: str) -> str | None:
    """Return the known key that an unknown one was probably meant to be; None when no key is similar.

    Tries in order: a key of the same group; a key whose group and name are the same elsewhere; a key of the
    same name further down; a key of the same depth with a similar full name; a key anywhere with a similar
    last part; any key with a similar full name.
    """
    keys = list(all_keys(group))
    parent, _, leaf = key.rpartition(".")
    siblings = {
        name: f"{head}.{name}" for head, _, name in (k.rpartition(".") for k in keys) if head == parent
    }
    below = {known.rpartition(".")[2]: known for known in reversed(keys) if known.startswith(f"{parent}.")}
    by_end = {_end(known): known for known in reversed(keys) if "." in known}
    by_leaf = {known.rpartition(".")[2]: known for known in reversed(keys)}
    attempts: tuple[tuple[str, dict[str, str], float], ...] = (
        (leaf, siblings if parent else {}, 0.7),
        (_end(key), by_end, 1.0),
        (leaf, below if parent else {}, 1.0),
        (key, {known: known for known in keys if known.count(".") == key.count(".")}, 0.8),
        (leaf, by_leaf, 0.8),
        (key, {known: known for known in keys}, 0.7),
    )
    for word, candidates, cutoff in attempts:
        if close := get_close_matches(word, candidates, n=1, cutoff=cutoff):
            return candidates[close[0]]
    return None


def _end(key: str) -> str:
    """Return the last two parts of a key."""
    return ".".join(key.split(".")[-2:])


def check_tree(
    tree: Mapping[str, Any], group: type, where: str, *, root: type, prefix: str = ""
) -> list[Problem]:
    """Return the problems of a tree of plain values: unknown keys, wrong types, unknown kinds.

    ``tree`` holds values of ``group``, which is part of the schema ``root`` and has the full key ``prefix``
    (with its dot). ``where`` is the file or argument that gave the values. Interpolations are skipped.
    """
    problems: list[Problem] = []
    known = hints_of_kinds(group)
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if name not in known:
            problems += (unknown_key(each, where, root=root) for each in _keys_to_report(key, value))
        elif found := check_value(key, value, known[name], where, root):
            problems += found
        elif name in keys(group) and (kinds := keys(group)[name][1].kinds):
            problems += _unknown_kinds(kinds, key, value, where)
    return problems


def unknown_kinds(root: type, key: str, value: Any, where: str) -> list[Problem]:
    """Return a problem for each name in the value of ``key`` that is not a kind which the key may name."""
    parent, _, leaf = key.rpartition(".")
    group = without_none(find(root, parent)) if parent else root
    group = item_group(group) or group
    kinds = keys(group)[leaf][1].kinds if is_group(group) and leaf in keys(group) else None
    return [*_unknown_kinds(kinds, key, value, where)] if kinds else []


def _unknown_kinds(kinds: Kinds, key: str, value: Any, where: str) -> Iterator[Problem]:
    """Yield a problem for each name in a value, a name or a list of names, that is none of ``kinds``."""
    named = {f"{key}[{index}]": name for index, name in enumerate(value)} if isinstance(value, list) else {}
    for at, name in (named or {key: value}).items():
        is_name = isinstance(name, str) and name != MISSING and not is_interpolation(name)
        if is_name and (problem := kinds.problem(at, name, where)):
            yield problem


def _keys_to_report(key: str, value: Any) -> Iterator[str]:
    """Yield the unknown keys to report for the unknown ``key``.

    Where another framework has a group ``key``, these are the keys below it, since each has its own name
    here.
    """
    from nemo_like.config.other_frameworks import has_names_below

    if isinstance(value, Mapping) and has_names_below(key):
        for name, inner in value.items():
            yield from _keys_to_report(f"{key}.{name}", inner)
    else:
        yield key


def unknown_key(key: str, where: str, *, root: type) -> Problem:
    """Build the problem of a key that the schema lacks; its remedy names the key that was probably meant."""
    rule = "is not a key of the configuration"
    return Problem(key=key, rule=rule, remedy=_what_was_meant(key, root), where=where)


def _what_was_meant(key: str, root: type) -> str:
    """Return the remedy for an unknown key.

    Tries in order: the name that another framework's key has here; the nearest key of the same group; the
    name that the key's last part has in another framework; the nearest key anywhere; all keys of the group.
    """
    # The tables are long, and only a key that is wrong needs them.
    from nemo_like.config.other_frameworks import known_name, nearest_name

    parent, _, leaf = key.rpartition(".")
    group = without_none(find(root, parent)) if parent else root
    names = hints_of_kinds(group) if is_group(group) else {}
    theirs = known_name(key)
    is_exact = theirs is not None and theirs.name == key
    if parent and not is_exact and (near := get_close_matches(leaf, names, n=1, cutoff=0.7)):
        return f"did you mean {parent}.{near[0]}?"
    if theirs:
        return str(theirs)
    # Before a key of the same name in another group: ``grpo.steps`` means ``grpo.max_num_steps``.
    longer = [name for name in names if set(leaf.split("_")) < set(name.split("_"))] if parent else []
    if len(longer) == 1:
        return f"did you mean {parent}.{longer[0]}?"
    if meant := nearest_key(root, key):
        return f"did you mean {meant}?"
    if theirs := nearest_name(key):
        return f"did you mean {theirs.here}, which is {theirs.framework}'s {theirs.name}?"
    return f"known there: {', '.join(names)}" if names else ""


def is_interpolation(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


def check_value(key: str, value: Any, annotation: Any, where: str, root: type) -> list[Problem]:
    """Return why a plain value does not fit the schema's type ``annotation`` of ``key``; empty if it fits."""
    kind = without_none(annotation)
    if value == MISSING or (is_interpolation(value) and not is_group(kind)):
        return []
    if (item := item_group(kind)) and isinstance(value, Mapping):
        return check_tree(value, item, where, root=root, prefix=f"{key}.")
    if value is None and (is_optional(annotation) or annotation is Any or item):
        return []
    if is_group(kind):
        if not isinstance(value, Mapping):
            return [_no_group(key, value, kind, where, root)]
        return check_tree(value, kind, where, root=root, prefix=f"{key}.")
    if entry := entry_group(kind):
        if not isinstance(value, Mapping):
            return [_no_entries(key, value, entry, where)]
        several = [(f"{key}.{name}", one, entry) for name, one in value.items()]
    elif (item := item_group(kind)) and isinstance(value, list):
        several = [(f"{key}[{index}]", one, item) for index, one in enumerate(value)]
    else:
        return [] if kind is Any else _leaf_problems(key, value, annotation, where)
    return [problem for one in several for problem in check_value(*one, where, root)]


def _no_group(key: str, value: Any, group: type, where: str, root: type) -> Problem:
    remedy = f"set {key}.{next(iter(hints(group)))} and so on"
    above = key.rpartition(".")[0]
    if isinstance(value, str) and (not above or entry_group(find(root, above))):
        placed = f"{above}@{key}" if above else key
        remedy += f", or leave it out and add `- {placed}: {value}` to the defaults"
    rule = f"is a group of keys and cannot be {_shown(value)}"
    return Problem(key=key, rule=rule, remedy=remedy, where=where)


def _no_entries(key: str, value: Any, entry: type, where: str) -> Problem:
    rule = "must be a mapping, in which each entry has a name and keys of its own"
    remedy = (
        f"write {key}: {{NAME: {{{next(iter(hints(entry)))}: ...}}}}, or leave it out and add "
        f"`- {key}@{key}.NAME: ...` to the defaults"
    )
    return Problem(key=f"{key}={_shown(value)}", rule=rule, remedy=remedy, where=where)


def _shown(value: Any) -> str:
    return "null" if value is None else repr(value)


def _leaf_problems(key: str, value: Any, annotation: Any, where: str) -> list[Problem]:
    try:
        _leaf(annotation).validate_python(value)
    except ValidationError as error:
        return [
            _wrong_type(*_at(key, annotation, each["loc"]), each["input"], where)
            for each in error.errors(include_url=False, include_context=False)
            if each["input"] != MISSING and not is_interpolation(each["input"])
        ]
    return []


@cache
def _leaf(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(Annotated[annotation, Leaf()])


def _at(key: str, annotation: Any, path: Sequence[int | str]) -> tuple[str, Any]:
    """Return full key and type of the value at ``path`` in lists and mappings below ``key``."""
    for part in path:
        key += f"[{part}]" if isinstance(part, int) else f".{part}"
        annotation = get_args(without_none(annotation))[-1]
    return key, annotation


@dataclass(frozen=True, slots=True)
class ByKind:
    """Metadata of a group to which kinds bring keys: has pydantic build the named kind's class."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        def of_class(value: Any, _: ValidatorFunctionWrapHandler) -> Any:
            return typed(value, class_of_tree(source, value)) if isinstance(value, Mapping) else value

        return no_info_wrap_validator_function(of_class, handler(source))


def typed(value: Any, annotation: Any) -> Any:
    """Return a plain value as the schema's type for it, with instances of groups and Enum members.

    ``check_value`` must have found no problem in it, and no key may be missing.
    """
    return _whole(annotation).validate_python(value)


@cache
def _whole(annotation: Any) -> TypeAdapter[Any]:
    return TypeAdapter(annotation)


def _wrong_type(key: str, annotation: Any, value: Any, where: str) -> Problem:
    kind = without_none(annotation)
    remedy = ""
    if isinstance(kind, type) and issubclass(kind, Enum):
        members = list(kind.__members__)
        expected = f"one of {', '.join(members)}"
        close = get_close_matches(str(value).lower(), members, n=1, cutoff=0.7)
        remedy = f"did you mean {close[0]}?" if close else ""
        if value is False and "off" in members:
            remedy = "write it as 'off', with quotes: without them YAML reads a boolean"
    else:
        expected = _type_name(kind)
        if isinstance(value, str) and (group := item_group(kind)) and "path" in hints(group):
            remedy = f"write {key}.path={value}"
    if is_optional(annotation):
        expected += " or null"
    return Problem(key=f"{key}={_shown(value)}", rule=f"must be {expected}", remedy=remedy, where=where)


def _type_name(kind: Any) -> str:
    origin, parameters = get_origin(kind), get_args(kind)
    if origin is list and is_group(parameters[0]):
        return "a group of keys or a list of such groups"
    if origin is list:
        return f"a list, each item {_type_name(parameters[0])}"
    if origin is dict:
        return "a mapping"
    return _SCALAR_NAMES.get(kind, str(getattr(kind, "__name__", kind)))


@cache
def without_none(annotation: Any) -> Any:
    """Return T for the type ``T | None``, and any other type unchanged."""
    if get_origin(annotation) in (Union, types.UnionType):
        rest = [part for part in get_args(annotation) if part is not type(None)]
        return rest[0] if len(rest) == 1 else annotation
    return annotation
