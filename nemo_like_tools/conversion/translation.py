"""Translates a configuration of another framework into one of this framework, by that framework's table.

their file ──▶ their_files ──▶ Theirs ──▶ convert_configuration ──▶ Conversion ──▶ conversion_yaml ──▶ YAML
                                table ─────────────┘
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

from nemo_like.algorithms.options import LOSS_KINDS, LossConfig
from nemo_like.config import fields
from nemo_like.config.keys import keys
from nemo_like.config.other_frameworks import Always, Entry, Framework, Missing, OurKey, our_keys, table_of
from nemo_like.config.problems import ConfigError, Problem
from nemo_like.configuration import Config
from nemo_like_tools.conversion import nemo_rl, nemo_rl_data, trl, values, verl
from nemo_like_tools.conversion.inheritance import BY_DEFAULT
from nemo_like_tools.conversion.values import LeftOut, Noted, Theirs, Untranslatable

# By the name that --from takes.
CONVERTIBLE: Mapping[str, Framework] = {name: table_of(name) for name in ("nemo_rl", "verl", "trl")}
# The modules with conversions for one framework, by its name; ``values`` has the others.
_OWN: Mapping[str, tuple[ModuleType, ...]] = {
    "NeMo-RL": (nemo_rl, nemo_rl_data),
    "verl": (verl,),
    "TRL": (trl,),
}
# Keys in their files that belong to Hydra and OmegaConf.
_INSTRUCTIONS = ("_target_", "_override_", "_self_", "_recursive_")


@dataclass(frozen=True, slots=True)
class Setting:
    """The value of a key here, and its origin: the keys of the other framework, or the habit, behind it."""

    value: Any
    origin: str


@dataclass(slots=True)
class Conversion:
    """The result of converting a configuration.

    ``settings`` are by key here. ``lost`` has each value that could not be translated, with the reason.
    ``notes`` says what a user must know of translated values. ``assumed`` has the defaults of the other
    framework that count here, by its keys.
    """

    settings: dict[str, Setting] = field(default_factory=dict)
    lost: list[Problem] = field(default_factory=list)
    notes: list[Problem] = field(default_factory=list)
    assumed: dict[str, Any] = field(default_factory=dict)


def framework_of(tree: Mapping[str, Any], name: str | None, where: str) -> Framework:
    """Return the framework called ``name``, or else the framework whose table has most of the file's keys.

    Raises ConfigError when there is none.
    """
    if name is not None:
        if name not in CONVERTIBLE:
            rule = "is not a framework whose configurations can be converted"
            raise ConfigError.of(f"--from={name}", rule, _choices())
        return CONVERTIBLE[name]
    counts = {key: sum(1 for _ in _known(tree, framework)) for key, framework in CONVERTIBLE.items()}
    best = max(counts, key=lambda key: counts[key])
    if not counts[best]:
        rule = "has no key that is known of another framework"
        raise ConfigError.of(where, rule, f"name its framework: {_choices()}")
    return CONVERTIBLE[best]


def convert_configuration(framework: Framework, theirs: Theirs, where: str) -> Conversion:
    """Translate every key of the configuration in the file ``where`` that has an effect."""
    found = Conversion()
    for key, value in _leaves(theirs.tree, framework):
        if _is_off(key, framework, theirs):
            continue
        entry = _entry(key, framework)
        if entry is None:
            _unnamed(key, value, framework, theirs, where, found)
        elif ends := our_keys(entry):
            for here in ends:
                _translate(key, value, here, framework, theirs, where, found)
        elif theirs.origin(key) != BY_DEFAULT and (why := _loss(value, entry)):
            found.lost.append(_problem(key, value, why, where))
    for key, habit in framework.habits.items():
        found.settings.setdefault(key, Setting(habit.value, f"as {framework.name} does: {habit.why}"))
    _without_a_critic(found, where)
    _without_other_losses(found)
    origins = {origin for setting in found.settings.values() for origin in setting.origin.split(", ")}
    found.assumed = {
        key: theirs(key)
        for key in framework.defaults
        if theirs.origin(key) == BY_DEFAULT and _origin(key, theirs) in origins
    }
    return found


def _origin(key: str, theirs: Theirs) -> str:
    """Return what a comment says of the key behind a value."""
    return f"{key} {theirs.origin(key)}".rstrip()


def _choices() -> str:
    return " or ".join(f"--from {name}" for name in CONVERTIBLE)


def _leaves(tree: Mapping[str, Any], framework: Framework, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield full keys with their values; a mapping that is one key of the table stays whole."""
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if name in _INSTRUCTIONS:
            continue
        has_names_below = any(other.startswith(f"{key}.") for other in framework.keys)
        is_whole = key in framework.keys and (our_keys(framework.keys[key]) or not has_names_below)
        if isinstance(value, Mapping) and value and not is_whole:
            yield from _leaves(value, framework, f"{key}.")
        else:
            yield key, value


def _entry(key: str, framework: Framework) -> Entry | None:
    """Return the table's entry of a key, or else of the innermost group above it that has an entry."""
    group = key
    while group:
        entry = framework.keys.get(group, framework.rest.get(group))
        is_for_key = group == key or group in framework.keys or not _is_ours(key, framework)
        if entry is not None and is_for_key and (group == key or not our_keys(entry)):
            return entry
        group = group.rpartition(".")[0]
    return None


def _is_ours(key: str, framework: Framework) -> bool:
    return framework.shares_names and not key.startswith("env.") and fields.find(Config, key) is not None


def _known(tree: Mapping[str, Any], framework: Framework) -> Iterator[str]:
    for key, _ in _leaves(tree, framework):
        if _entry(key, framework) is not None:
            yield key


def _is_off(key: str, framework: Framework, theirs: Theirs) -> bool:
    """Return whether their configuration switches off the group of a key. A missing switch is on."""
    for switch in framework.switches:
        is_below = key == switch.group or key.startswith(f"{switch.group}.")
        if is_below and key != switch.by and theirs(switch.by, switch.values[0]) not in switch.values:
            return True
    return False


def _loss(value: Any, entry: Entry) -> str:
    """Return why a value without a counterpart is lost; empty when nothing is lost."""
    if isinstance(entry, Missing) and value not in entry.neutral:
        return f"is missing here: {entry.why}"
    if isinstance(entry, Always) and value is not None and value not in entry.values:
        return f"is never so here: {entry.why}"
    return ""


def _unnamed(
    key: str, value: Any, framework: Framework, theirs: Theirs, where: str, found: Conversion
) -> None:
    """Keep a key that is not in the table if it exists here with the same meaning; else report it lost."""
    annotation = fields.find(Config, key) if framework.shares_names else None
    is_nothing = value == {} or (value is None and not fields.is_optional(annotation))
    if annotation is not None and not is_nothing:
        _set(key, value, _origin(key, theirs), key, where, found)
    elif annotation is None and value not in (None, {}, [], "???"):
        why = f"is in no table of {framework.name}'s keys; --dry-run shows whether the plan is yours"
        found.lost.append(_problem(key, value, why, where))


def _translate(
    key: str, value: Any, here: OurKey, framework: Framework, theirs: Theirs, where: str, found: Conversion
) -> None:
    if value == "???":
        return
    try:
        converted = conversion_of(framework.name, here)(value, theirs)
    except Untranslatable as error:
        found.lost.append(_problem(key, value, f"is not translated: {error}", where))
        return
    except (TypeError, ValueError, KeyError, IndexError, AttributeError) as error:
        why = f"is not translated: it is no value of {here.key} ({error}); set {here.key} yourself"
        found.lost.append(_problem(key, value, why, where))
        return
    if isinstance(converted, LeftOut):
        return
    if isinstance(converted, Noted):
        found.notes.append(_problem(key, value, converted.note, where))
        converted = converted.value
    _set(here.key, converted, _origin(key, theirs), key, where, found)


def conversion_of(framework: str, key: OurKey) -> Callable[[Any, Theirs], Any]:
    """Return the function that computes the value of ``key`` from their value and configuration."""
    modules = (*_OWN.get(framework, ()), values)
    found = next(vars(module)[key.by] for module in modules if key.by in vars(module))
    return partial(found, **key.arguments)


def _set(here: str, value: Any, origin: str, key: str, where: str, found: Conversion) -> None:
    annotation = fields.find(Config, here)
    if wrong := fields.check_value(here, value, annotation, where, Config):
        found.lost.append(_problem(key, value, f"is not translated: {wrong[0].key} {wrong[0].rule}", where))
        return
    before = found.settings.get(here)
    if before is not None and before.value == value and before.origin != origin:
        origin = f"{before.origin}, {origin}"
    found.settings[here] = Setting(value, origin)


def _without_a_critic(found: Conversion, where: str) -> None:
    """Drop the settings of a critic unless the estimator of advantages uses one."""
    estimator = found.settings.get("grpo.adv_estimator.name")
    if estimator is not None and estimator.value == "gae":
        return
    for key in [key for key in found.settings if key.startswith("value.")]:
        del found.settings[key]


def _without_other_losses(found: Conversion) -> None:
    """Drop the settings that are keys of another kind of loss than the chosen kind."""
    chosen = found.settings.get("loss_fn.kind")
    name = keys(LossConfig)["kind"][1].default if chosen is None else chosen.value
    own = fields.hints(LOSS_KINDS.load(name).options)
    for key in [key for key in found.settings if key.startswith("loss_fn.")]:
        if key.split(".")[1] not in own:
            del found.settings[key]


def _problem(key: str, value: Any, why: str, where: str) -> Problem:
    rule, _, remedy = why.partition("; ")
    return Problem(key=f"{key}={_shown(value)}", rule=rule, remedy=remedy, where=where)


def _shown(value: Any) -> str:
    is_plain = value is None or isinstance(value, bool)
    text = json.dumps(value) if is_plain else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def problem_lines(problems: Sequence[Problem]) -> list[str]:
    """Return problems as lines; problems with the same reason share a line."""
    keys: dict[tuple[str, str], list[str]] = {}
    for problem in problems:
        keys.setdefault((problem.rule, problem.remedy), []).append(problem.key)
    return [
        f"{', '.join(dict.fromkeys(names))} {rule}" + (f"; {remedy}" if remedy else "")
        for (rule, remedy), names in keys.items()
    ]
