"""Declares a key beside its type: its sentence, its default and its limits.

    lr: Annotated[float, Key("the peak", 1e-6, above=0)]

``scripts/write_configs.py`` writes the YAML files in ``configs/`` and the JSON schemas from these
declarations. No code falls back on a default: every key of a loaded configuration got its value from a file
or an argument.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt
from pydantic import (
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema
from pydantic_core.core_schema import no_info_after_validator_function, no_info_wrap_validator_function

from nemo_like.config.kinds import Kinds
from nemo_like.config.problems import Problem
from nemo_like.config.secrets import reference_of, referring

MISSING = "???"  # stands for a missing value: the key must be set
# The fields of ``Key`` that are limits, with pydantic's classes for them.
_LIMITS: dict[str, Any] = {"at_least": Ge, "above": Gt, "at_most": Le, "below": Lt}


class Leaf:
    """Metadata of a type that has pydantic take a YAML value without converting it.

    Three exceptions: an integer may stand for a float, a number for a text, and the name of an Enum's member
    for the member. A value from the environment still remembers the interpolation that gave it.
    """

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return _as_it_is(handler(source))


def _as_it_is(schema: Any) -> Any:
    """Return pydantic's description of a type, and of the types within it, with the rules of ``Leaf``."""
    kind = schema["type"]
    if kind in ("int", "float", "bool"):
        return {**schema, "strict": True}
    within = [name for name in ("schema", "items_schema", "values_schema") if name in schema]
    inner = {**schema, **{name: _as_it_is(schema[name]) for name in within}}
    if kind == "str":
        inner["coerce_numbers_to_str"] = True
    return no_info_wrap_validator_function(_still_referring, inner) if kind in _HAVE_TEXTS else inner


_HAVE_TEXTS = ("str", "list", "dict")


def _still_referring(value: Any, convert: ValidatorFunctionWrapHandler) -> Any:
    converted, reference = convert(value), reference_of(value)
    return referring(converted, reference) if reference else converted


@dataclass(frozen=True, slots=True)
class Key(Leaf):
    """The declaration of a key.

    ``about`` is its sentence, the comment beside it in YAML. ``default`` may be an interpolation. The limits
    hold for numbers; ``below=inf`` asks for a finite number. ``remedy`` ends the message of a number beyond
    the limits. ``kinds`` has the kinds that a text, or the texts of a list, may name. ``is_path`` says that
    the value may be a path, so that ``~`` at its beginning is the user's home.
    """

    about: str = ""
    default: Any = MISSING
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    remedy: str = ""
    kinds: Kinds | None = None
    is_path: bool = False

    @property
    def limits(self) -> tuple[Ge | Gt | Le | Lt, ...]:
        """The limits, as pydantic takes them."""
        given = {name: getattr(self, name) for name in _LIMITS}
        return tuple(_LIMITS[name](limit) for name, limit in given.items() if limit is not None)

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema = Leaf.__get_pydantic_core_schema__(self, source, handler)
        return no_info_after_validator_function(_without_tilde, schema) if self.is_path else schema

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Describe the key for editors: its values within the limits, its sentence and its default."""
        values = handler(schema)
        if self.kinds is not None:
            named = {"anyOf": [{"enum": list(self.kinds.names())}, {"type": "string", "pattern": ":"}]}
            values = {**values, "items": named} if values.get("type") == "array" else named
        bounds = handler(_number(self.limits).core_schema) if self.limits else {}
        bounds = {name: limit for name, limit in bounds.items() if limit != math.inf}
        for one in values.get("anyOf", [values]):
            if one.get("type") in ("integer", "number"):
                one.update({name: limit for name, limit in bounds.items() if name != "type"})
        described: dict[str, Any] = {"description": self.about} if self.about else {}
        if self.default != MISSING:
            described["default"] = self.default.name if isinstance(self.default, Enum) else self.default
        return {"allOf": [values], **described} if "$ref" in values else {**values, **described}


def _without_tilde(value: Any) -> Any:
    """Return a path, or the paths of a list or of a mapping's values, with the home in the place of ``~``."""
    if isinstance(value, str) and value.startswith("~"):
        return os.path.expanduser(value)
    if isinstance(value, list):
        return [_without_tilde(path) for path in value]
    if isinstance(value, dict):
        return {name: _without_tilde(path) for name, path in value.items()}
    return value


@cache
def keys(group: type) -> dict[str, tuple[Any, Key]]:
    """Return the type and the ``Key`` of each field of a group, in order; the ``Key`` may be empty."""
    annotated = get_type_hints(group, include_extras=True)
    return {field.name: _split(annotated[field.name]) for field in fields(group)}


def _split(annotation: Any) -> tuple[Any, Key]:
    if get_origin(annotation) is not Annotated:
        return annotation, Key()
    kind, *more = get_args(annotation)
    return kind, next((one for one in more if isinstance(one, Key)), Key())


def beyond_limits(group: Any, prefix: str = "") -> Iterator[Problem]:
    """Yield a problem for every number in an instance of a group, and in the groups below it, that breaks its
    limits.

    Mappings of names to groups are entered; null and the items of lists are not checked.
    """
    kind: type = type(group)
    for name, (_, key) in keys(kind).items():
        value = getattr(group, name)
        if is_dataclass(value):
            yield from beyond_limits(value, f"{prefix}{name}.")
        elif isinstance(value, Mapping):
            for entry, inner in value.items():
                if is_dataclass(inner):
                    yield from beyond_limits(inner, f"{prefix}{name}.{entry}.")
        elif value is not None and key.limits and not _is_within(value, key.limits):
            yield Problem(key=f"{prefix}{name}={value}", rule=_asked(key), remedy=key.remedy)


def _asked(key: Key) -> str:
    """Return what the limits of a key demand of a number, such as "must be above 0 and at most 1"."""
    given = {name.replace("_", " "): getattr(key, name) for name in _LIMITS}
    return "must be " + " and ".join(
        "finite" if limit == math.inf else f"{word} {limit:g}"
        for word, limit in given.items()
        if limit is not None
    )


def _is_within(value: float, limits: tuple[Ge | Gt | Le | Lt, ...]) -> bool:
    try:
        _number(limits).validate_python(value)
    except ValidationError:
        return False
    return True


@cache
def _number(limits: tuple[Ge | Gt | Le | Lt, ...]) -> TypeAdapter[float]:
    return TypeAdapter(Annotated[(float, *limits)])
