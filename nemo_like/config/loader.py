"""Loads a typed configuration from a YAML file and command-line arguments.

Hydra composes them (https://hydra.cc/docs/advanced/defaults_list/). The ``defaults`` of a file name the files
on which it builds; these are searched beside it and among the shipped configurations, so the file may be
anywhere::

    defaults:
      - grpo_arithmetic_cpu             # merged as it is
      - override policy: fsdp           # policy/fsdp.yaml instead of that file's choice, put under "policy"
      - env@env.math: math_verify       # env/math_verify.yaml, put under "env.math"
      - _self_                          # the file's own values win over those above, also without this line

This module also checks what Hydra does not: unknown keys, keys without a value, and values of a wrong type.

A text that environment variables gave is written down as the interpolation that asked for it (``secrets``),
so loading a written configuration needs the same variables again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass, replace
from difflib import get_close_matches
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_like.config import fields
from nemo_like.config.arguments import Arguments, read_arguments
from nemo_like.config.composition import Composition, SweepSettings, composing
from nemo_like.config.grammar import Override
from nemo_like.config.import_path import also_search
from nemo_like.config.interpolations import KeyPath, full_key, interpolations, texts, with_values
from nemo_like.config.keys import MISSING
from nemo_like.config.kind_defaults import fill_kinds
from nemo_like.config.lists import complete_lists, make_lists, single_groups
from nemo_like.config.nodes import config_of
from nemo_like.config.problems import ConfigError, Problem
from nemo_like.config.resolvers import environment_reads, register_resolvers
from nemo_like.config.search_path import SHIPPED
from nemo_like.config.secrets import is_masked, masked, reference_of, referring
from nemo_like.config.sweep_jobs import BASIC, combinations, interval_problems, possible_jobs

_Root = TypeVar("_Root")

# Text in a value that would be read as an interpolation, with the backslashes before it.
_INTERPOLATION_START = re.compile(r"(\\*)\$\{")


def load(path: str | Path, overrides: Sequence[str], root: type[_Root]) -> _Root:
    """Return the configuration of the file ``path`` with the arguments ``overrides``, as an instance of
    ``root``.

    Raises ConfigError, which lists the problems found.
    """
    _prepare(path)
    with composing(Path(path)) as files:
        arguments = read_arguments(files, overrides, root)
        _raise(arguments.problems)
        tree = files.compose(arguments.files, arguments.values)
    whole = _finish(tree, arguments, str(path))
    assert isinstance(whole, root)
    return whole


@dataclass(frozen=True, slots=True)
class Sweep:
    """Several runs of one configuration. ``jobs`` has the arguments of each run."""

    arguments: list[str]  # as hydra.main takes them; some set alternatives
    directory: str  # in which each run gets a directory
    jobs: list[list[str]]  # the arguments of each run, or of examples, as load_config takes them
    jobs_are_examples: bool  # the sweeper chooses values while it runs, so that ``jobs`` cannot be known


def load_sweep(path: str | Path, overrides: Sequence[str], root: type) -> Sweep:
    """Return the runs that the arguments ``overrides`` ask for.

    Raises ConfigError, which lists the problems found. Problems of some combinations only are left to those
    runs.
    """
    _prepare(path)
    with composing(Path(path)) as files:
        arguments = read_arguments(files, overrides, root, is_sweep=True)
        _raise(arguments.problems)
        settings = files.sweep_settings(arguments.for_hydra)
        given = [*_params(files, settings), *map(files.parse, arguments.for_hydra)]
        swept = [argument for argument in given if not argument.is_hydra_override()]
        chooses = settings.sweeper != BASIC
        if not chooses:
            _raise(interval_problems(swept))
        return Sweep(
            arguments=[*files.search_path, *arguments.for_hydra],
            directory=settings.directory,
            jobs=[[*files.search_path, *job] for job in (possible_jobs if chooses else combinations)(swept)],
            jobs_are_examples=chooses,
        )


def _prepare(path: str | Path) -> None:
    """Make interpolations resolvable, and the modules beside a user's own file importable."""
    register_resolvers()
    folder = Path(path).absolute().parent
    if not any(folder.is_relative_to(shipped) for shipped in SHIPPED):
        also_search(folder)


def _params(files: Composition, settings: SweepSettings) -> Iterator[Override]:
    """Yield the sweeps that the files ask for, as arguments. Raises ConfigError when one cannot be read."""
    for text in settings.in_files:
        try:
            yield files.parse(text)
        except HydraException as error:
            rule = "is not a value or a sweep of Hydra's grammar"
            problem = Problem(
                key=f"hydra.sweeper.params: {text}", rule=rule, remedy="write key: 1,2 for example"
            )
            raise ConfigError([problem]) from error


def to_yaml(cfg: Any) -> str:
    """Return a configuration as YAML, from which ``load`` makes an equal one under the same environment
    variables.

    The password of a URL is masked, and has to be given again.
    """
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(cfg)))


def to_dict(cfg: Any) -> dict[str, Any]:
    """Return a configuration as nested dicts of plain values, the content of ``to_yaml``.

    Enum members are written by name, and texts from the environment as interpolations.
    """
    plain = _plain(cfg)
    assert isinstance(plain, dict)
    return single_groups(plain, type(cfg))


def _plain(value: Any) -> Any:
    if reference := reference_of(value):
        return masked(reference)
    if is_dataclass(value) and not isinstance(value, type):
        return {name: _plain(getattr(value, name)) for name in fields.hints(type(value))}
    if isinstance(value, Mapping):
        return {name: _plain(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, str):
        return _INTERPOLATION_START.sub(lambda start: start[1] * 2 + "\\${", masked(value))
    return value


def _raise(problems: Sequence[Problem]) -> None:
    if problems:
        raise ConfigError(problems)


def _finish(tree: dict[str, Any], arguments: Arguments, path: str) -> Any:
    """Resolve the interpolations of a composed tree, check it, and return it as an instance of its class."""
    root = arguments.root
    _raise(_without_defaults(tree, arguments, path))
    tree.setdefault("vars", {})
    for name, annotation in fields.hints(root).items():
        if fields.is_optional(annotation) and (name not in tree or arguments.is_removed(name)):
            tree[name] = None
    complete_lists(tree, root)
    values, problems, references = _resolved(tree, root)
    _raise([replace(problem, where=arguments.source_of(problem.key, "")) for problem in problems])
    resolved = with_values(tree, values, root)
    for key_path, text in references.items():
        _refer(resolved, key_path, text)
    make_lists(resolved, root)
    of_others = fill_kinds(resolved, root, arguments.was_replaced)
    wrong = [*fields.check_tree(resolved, root, path, root=root), *of_others, *_masked_passwords(resolved)]
    problems = [replace(problem, where=arguments.source_of(problem.key, path)) for problem in wrong]
    _raise([*problems, *_missing(resolved, root, "", path)])
    return fields.typed(resolved, root)


def _resolved(
    tree: Mapping[str, Any], root: type
) -> tuple[dict[KeyPath, Any], list[Problem], dict[KeyPath, str]]:
    """Return the values of the interpolations by key path, the problems of interpolations, and by key path
    the interpolations that read the environment."""
    values, problems, references = dict[KeyPath, Any](), list[Problem](), dict[KeyPath, str]()
    found = list(interpolations(tree))
    unresolved = config_of(tree) if found else OmegaConf.create()
    for key_path, text in found:
        key = full_key(key_path)
        with environment_reads() as names:
            try:
                values[key_path] = _value_at(unresolved, key_path)
            except (OmegaConfBaseException, ValueError) as error:
                rule = f"cannot be resolved: {str(error).splitlines()[0]}"
                problems.append(Problem(key=f"{key}={text}", rule=rule, remedy=""))
        if names:
            references[key_path] = text
            if _holds_groups(key_path, root):
                rule = f"cannot come whole from the environment ({', '.join(names)})"
                problems.append(Problem(key=f"{key}={text}", rule=rule, remedy="set its keys one by one"))
    return values, problems, references


def _value_at(tree: DictConfig, key_path: KeyPath) -> Any:
    value: Any = tree
    for part in key_path:
        value = value[part]
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _holds_groups(key_path: KeyPath, root: type) -> bool:
    kind = fields.without_none(
        fields.find(root, ".".join(part for part in key_path if isinstance(part, str)))
    )
    return bool(fields.is_group(kind) or fields.item_group(kind) or fields.entry_group(kind))


def _refer(tree: Any, key_path: KeyPath, text: str) -> None:
    """Mark the value at ``key_path``, in ``tree`` itself, as given by the interpolation ``text``."""
    *parents, last = key_path
    for part in parents:
        tree = tree[part]
    tree[last] = referring(tree[last], text)


def _masked_passwords(value: Any) -> Iterator[Problem]:
    """Yield a problem for each URL whose password was masked when a run wrote its configuration."""
    for key_path, text in texts(value):
        if is_masked(text):
            yield Problem(
                key=f"{full_key(key_path)}={text}",
                rule="has a mask in the place of a password",
                remedy="give the key anew; of a password written as ${oc.env:NAME} a run keeps these words",
            )


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (full key, value) of everything below ``prefix`` except mappings that have keys."""
    if isinstance(value, Mapping) and (value or not prefix):
        for name, inner in value.items():
            yield from _leaves(f"{prefix}.{name}" if prefix else str(name), inner)
    else:
        yield prefix, value


def _without_defaults(tree: Mapping[str, Any], arguments: Arguments, path: str) -> list[Problem]:
    """Return the problem of a file that builds on no other file, or on parts alone, and lacks groups that a
    run needs."""
    needed = [
        name for name, annotation in fields.hints(arguments.root).items() if fields.is_group(annotation)
    ]
    lacking = [name for name in needed if name not in tree]
    is_alone = len({layer.where for layer in arguments.files}) == 1
    if not lacking or not (is_alone or len(lacking) > len(needed) // 2):
        return []
    rule = f"names no {'' if is_alone else 'whole '}file to build on, and lacks {', '.join(lacking)}"
    remedy = "put `defaults: [grpo_cpu]` at its top, or another file of configs/, as grpo_gpu"
    return [Problem(key=path, rule=rule, remedy=remedy)]


def _bare_entry(key: str, lacking: Sequence[Problem], entries: Mapping[str, Any], path: str) -> Problem:
    """Return the problem of an entry that lacks many keys, as when an argument mistypes its name."""
    group, _, name = key.rpartition(".")
    close = get_close_matches(name, [one for one in entries if one != name], n=1, cutoff=0.6)
    remedy = f"add `- {group}@{key}: KIND` to the defaults in {path}"
    if close:
        remedy = f"did you mean {group}.{close[0]}? Else {remedy}"
    rule = f"has no {lacking[0].key} and {len(lacking) - 1} more"
    return Problem(key=key, rule=rule, remedy=remedy, where=path)


def _missing(tree: Any, group: type, prefix: str, path: str) -> Iterator[Problem]:
    for name, annotation in fields.hints(fields.class_of_tree(group, tree)).items():
        key, is_group = f"{prefix}{name}", fields.is_group(annotation)
        inner = fields.without_none(annotation)
        if name not in tree or tree[name] == MISSING:
            remedy = f"set {'its keys' if is_group else 'it'} in {path}" + (
                f", or add `- {key}: default` to its defaults"
                if is_group and not prefix
                else " or on the command line"
            )
            yield Problem(key=key, rule="has no value", remedy=remedy, where=path)
        elif is_group and isinstance(tree[name], Mapping):
            yield from _missing(tree[name], annotation, f"{key}.", path)
        elif fields.is_group(inner) and isinstance(tree[name], Mapping):
            if lacking := list(_missing(tree[name], inner, f"{key}.", path)):
                names = ", ".join(problem.key for problem in lacking[:3])
                rule = f"has no {names}" + (f" and {len(lacking) - 3} more" if len(lacking) > 3 else "")
                remedy = f"set them in {path}"
                if len(lacking) > 3:  # as an argument, the group's file would win over the file's own keys
                    remedy = f"add `- {key}: default` to the defaults in {path}, or {key}=default"
                yield Problem(key=key, rule=rule, remedy=remedy, where=path)
        elif entry := fields.entry_group(annotation):
            for entry_name, keys in tree[name].items():
                lacking = list(_missing(keys, entry, f"{key}.{entry_name}.", path))
                yield from (
                    lacking
                    if len(lacking) <= 3
                    else [_bare_entry(f"{key}.{entry_name}", lacking, tree[name], path)]
                )
        else:
            yield from (
                Problem(
                    key=leaf,
                    rule="has no value",
                    remedy=f"set it in {path} or on the command line",
                    where=path,
                )
                for leaf, value in _leaves(key, tree[name])
                if value == MISSING
            )
