"""Writes a converted configuration as YAML: the values that differ from the base, with their origins."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from nemo_like.config import fields
from nemo_like.config.composition import composing
from nemo_like.config.problems import Problem
from nemo_like.config.search_path import find_configuration
from nemo_like.configuration import Config
from nemo_like_tools.conversion.translation import Conversion, Setting, problem_lines

_BASE = "grpo_gpu"


def conversion_yaml(conversion: Conversion, framework: str, source: str = "a configuration") -> str:
    """Return the YAML of a conversion. ``source`` names the other framework's file in the first comment."""
    settings = dict(conversion.settings)
    backend = settings.pop("policy.backend", None)
    estimator = settings.get("grpo.adv_estimator.name")
    defaults = [_BASE]
    if estimator is not None and estimator.value == "gae":
        defaults.append("value: default")
    for key in [key for key in settings if key.startswith("env.") and key.endswith(".kind")]:
        defaults.append(f"env@{key.removesuffix('.kind')}: {settings.pop(key).value}")
    if backend is not None and backend.value == "fsdp":
        defaults.append("override policy: fsdp")
    base = _base()
    kept = {key: setting for key, setting in settings.items() if not _is_so(key, setting.value, base)}
    lines = [
        f"# From {source} of {framework} by scripts/convert_config.py; after each value, the key behind it.",
        *_granted(conversion.assumed, framework),
        *_missing(conversion.lost),
    ]
    lines += ["defaults:", *(f"  - {entry}" for entry in (*defaults, "_self_"))]
    tree: dict[str, Any] = {}
    for key in sorted(kept, key=_order):
        _insert(tree, key.split("."), kept[key])
    for name, inner in tree.items():
        lines += ["", *_lines(name, inner, "")]
    return "\n".join(lines) + "\n"


def _granted(assumed: Mapping[str, Any], framework: str) -> list[str]:
    """Return comments with the defaults of the other framework that were taken for granted."""
    if not assumed:
        return []
    lines = [f"# Taken for granted, as nothing sets them, are these defaults of {framework}:"]
    return [*lines, *(f"#   {key}={_flow(value)}" for key, value in assumed.items())]


def _missing(lost: Sequence[Problem]) -> list[str]:
    """Return comments with what could not be translated, and what to set instead."""
    lines = ["# Not translated; what is not set below is as the base has it:"] if lost else []
    return [*lines, *(f"#   {line}" for line in problem_lines(lost))]


def _base() -> Mapping[str, Any]:
    """Return the shipped base configuration as a tree with unresolved interpolations."""
    with composing(find_configuration(_BASE)) as files:
        return files.compose(files.layers(()), ())


def _is_so(key: str, value: Any, base: Mapping[str, Any]) -> bool:
    """Return whether the base configuration already has this value. Always False for a mapping."""
    found: Any = base
    for part in key.split("."):
        if not isinstance(found, Mapping) or part not in found:
            return False
        found = found[part]
    is_plain = not isinstance(value, Mapping)
    return is_plain and found == value and isinstance(found, bool) == isinstance(value, bool)


def _order(key: str) -> list[tuple[int, str]]:
    """Return a sort key for a full key: its position in the schema, group by group."""
    order: list[tuple[int, str]] = []
    group: Any = Config
    for part in key.split("."):
        names = list(fields.hints_of_kinds(group)) if fields.is_group(group) else []
        order.append((names.index(part) if part in names else len(names), part))
        annotation = fields.hints_of_kinds(group).get(part) if fields.is_group(group) else None
        group = fields.entry_group(annotation) or fields.without_none(annotation)
    return order


def _insert(tree: dict[str, Any], parts: list[str], setting: Setting) -> None:
    for part in parts[:-1]:
        tree = tree.setdefault(part, {})
    tree[parts[-1]] = setting


def _lines(name: str, inner: Any, indent: str) -> list[str]:
    if not isinstance(inner, Setting):
        below = [line for key, value in inner.items() for line in _lines(key, value, f"{indent}  ")]
        return [f"{indent}{name}:", *below]
    value = inner.value
    if isinstance(value, Mapping) and value:
        below = [f"{indent}  {key}: {_flow(each)}" for key, each in value.items()]
        return [f"{indent}{name}: # {inner.origin}", *below]
    if isinstance(value, list) and any(isinstance(each, Mapping) for each in value):
        return [f"{indent}{name}: # {inner.origin}", *(f"{indent}  - {_flow(each)}" for each in value)]
    return [f"{indent}{name}: {_flow(value)} # {inner.origin}"]


def _flow(value: Any) -> str:
    """Return a value as YAML on one line."""
    if isinstance(value, str) and "\n" in value:
        return json.dumps(value, ensure_ascii=False)
    text = yaml.safe_dump(value, default_flow_style=True, width=10**9, allow_unicode=True, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...").strip()
