"""JSON schemas of the YAML files of a configuration, with which editors complete keys and mark mistakes.

A file sets only some keys of a group, so the schemas require none. A value may also be an interpolation, or
``???`` where another file or an argument brings the value. The schemas are of draft 7, which the YAML
extensions of editors know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

_DRAFT = "http://json-schema.org/draft-07/schema#"
_OPEN = "#/definitions/open"
# Stands for a value that the file itself does not have.
_OPEN_VALUE = {"type": "string", "pattern": r"\$\{|^\?\?\?$"}
_OF_KEY = ("description", "default")
# The entries that Hydra reads in a file besides the keys.
_DEFAULTS = {"type": "array", "description": "the configurations that this one builds on, by Hydra"}


def file_schema(group: type, further: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the schema of files that set keys of ``group``. ``further`` has the schemas of other keys."""
    schema = definitions(group)
    whole = schema.pop(group.__name__)
    whole["properties"] = {"defaults": _DEFAULTS, **(further or {}), **whole["properties"]}
    return {"$schema": _DRAFT, **whole, "definitions": {**schema, "open": _OPEN_VALUE}}


def definitions(group: type) -> dict[str, Any]:
    """Return the schemas, by class name, of a group and of every group and Enum below it.

    They refer to a definition ``open``, which the caller adds.
    """
    found = TypeAdapter(group).json_schema(ref_template="#/definitions/{model}")
    named = {**found.pop("$defs", {}), group.__name__: found}
    return {name: _partial(one) for name, one in named.items()}


def _partial(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema that files need of a group or an Enum, made from pydantic's ``schema`` of it."""
    if "properties" not in schema and schema.get("type") != "object":
        return {name: value for name, value in schema.items() if name not in ("title", "description")}
    properties = {name: _value(one) for name, one in schema.get("properties", {}).items()}
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _value(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema that files need of a key's value, made from pydantic's ``schema`` of it."""
    described = {name: schema[name] for name in _OF_KEY if name in schema}
    bare = {name: value for name, value in schema.items() if name not in (*_OF_KEY, "title")}
    if not bare:
        return described  # any value
    values = [_within(one) for one in bare.get("anyOf", [bare])]
    values += [{"type": "number"}] if any(one.get("type") == "string" for one in values) else []
    return {**described, "anyOf": [*values, *_single(values), {"$ref": _OPEN}]}


def _within(schema: Mapping[str, Any]) -> dict[str, Any]:
    inner = dict(schema)
    if isinstance(schema.get("items"), Mapping):
        inner["items"] = schema["items"] if "$ref" in schema["items"] else _value(schema["items"])
    if isinstance(schema.get("additionalProperties"), Mapping):
        of_names = schema["additionalProperties"]
        inner["additionalProperties"] = of_names if "$ref" in of_names else _value(of_names)
    return {name: value for name, value in inner.items() if name != "title"}


def _single(values: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the group's schema for each list of groups: a file may write one group instead of a list."""
    return [one["items"] for one in values if "$ref" in one.get("items", {})]
