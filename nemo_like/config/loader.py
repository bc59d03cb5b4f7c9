"""The loader, which makes a typed ``Config`` of YAML files and command-line arguments.

A file may name others that it builds on, its defaults. Its own values win over theirs, and those of later
defaults over those of earlier ones::

    defaults:
      - ../configs/grpo_arithmetic_cpu.yaml   # merged as it is
      - grpo: default                         # grpo/default.yaml beside this file, put under "grpo"
      - env@env.math: math_verify             # env/math_verify.yaml beside this file, put under "env.math"

A default that is not beside the file is looked for in the shipped ``configs/``, so that a file may be
anywhere.

Arguments follow Hydra's grammar: ``key=value`` and ``++key=value`` set a value, ``+key=value`` sets one only
where there was none, and ``~key`` sets null. A key that the schema does not know is an error, and so is a key
that is left without a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from nemo_like.config import fields
from nemo_like.config.lists import complete_lists, interpolations, make_lists, single_groups
from nemo_like.config.problems import ConfigError, Problem
from nemo_like.config.resolvers import register_resolvers
from nemo_like.config.schema import Config

_MISSING = "???"
_SHIPPED = Path(__file__).resolve().parents[2] / "configs"


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Return the typed configuration of the file ``path`` with the arguments ``overrides`` applied.

    Raises ConfigError, which lists the problems found.
    """
    register_resolvers()
    draft = _Draft()
    for layer in _layers(Path(path), ()):
        draft.add_layer(layer)
    for argument in overrides:
        draft.apply(argument)
    return draft.finish(str(path))


def to_yaml(cfg: Config) -> str:
    """Return the configuration as YAML that ``load_config`` reads back to an equal one."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(cfg)))


def to_dict(cfg: Config) -> dict[str, Any]:
    """Return the configuration as nested dicts of plain values, Enum members by name."""
    plain = OmegaConf.to_container(OmegaConf.structured(cfg), resolve=True, enum_to_str=True)
    assert isinstance(plain, dict)
    return single_groups({str(group): keys for group, keys in plain.items()}, Config)


@dataclass(frozen=True, slots=True)
class _Layer:
    where: str
    tree: Mapping[str, Any]


def _layers(path: Path, including: tuple[Path, ...]) -> Iterator[_Layer]:
    """Yield the file's defaults, each after the files that it builds on, then the file itself.

    ``including`` is the chain of files that led to this one. Raises ConfigError when a file cannot be read or
    is reached from itself.
    """
    if path.resolve() in (earlier.resolve() for earlier in including):
        chain = " -> ".join(str(step) for step in (*including, path))
        raise _file_error(path, f"is reached from itself by its defaults: {chain}", "break the cycle")
    tree = dict(_read_yaml(path, including))
    entries = tree.pop("defaults", None) or []
    for entry in [entries] if isinstance(entries, str | Mapping) else entries:
        if isinstance(entry, str):
            yield from _layers(_default(entry, (*including, path)), (*including, path))
        elif isinstance(entry, Mapping) and len(entry) == 1:
            ((group, name),) = entry.items()
            folder, _, package = str(group).partition("@")
            for layer in _layers(_default(f"{folder}/{name}", (*including, path)), (*including, path)):
                yield _Layer(layer.where, _nested(package or Path(folder).name, layer.tree))
        else:
            rule = f"has an entry {entry!r} in its defaults"
            raise _file_error(path, rule, "an entry is a path, one group: name, or one group@key: name")
    yield _Layer(str(path), tree)


def _default(entry: str, including: tuple[Path, ...]) -> Path:
    """Return the file that an entry in the defaults of ``including[-1]`` means.

    That is the file beside it; where there is none but a shipped one, it is that.
    """
    beside = _with_suffix(including[-1].parent / entry)
    shipped = _with_suffix(_shipped_folder(including) / entry)
    return shipped if shipped.is_file() and not beside.is_file() else beside


def _shipped_folder(including: tuple[Path, ...]) -> Path:
    """Return the folder of ``configs/`` that ``including[-1]`` would be in if ``including[0]`` were in it."""
    first, last = including[0].parent, including[-1].parent
    return _SHIPPED / last.relative_to(first) if last.is_relative_to(first) else _SHIPPED


def _nested(key: str, tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a tree that has ``tree`` under the full key ``key``."""
    for name in reversed(key.split(".")):
        tree = {name: tree}
    return tree


def _read_yaml(path: Path, including: tuple[Path, ...]) -> Mapping[str, Any]:
    if not path.is_file():
        raise _no_such_file(path, including)
    try:
        loaded = OmegaConf.load(path)
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise _file_error(path, f"is not valid YAML: {' '.join(str(error).split())}", "") from error
    if not isinstance(loaded, DictConfig):
        raise _file_error(path, "must be a mapping of groups of keys, not a list", "")
    tree = OmegaConf.to_container(loaded, resolve=False)
    return {str(key): value for key, value in tree.items()} if isinstance(tree, dict) else {}


def _no_such_file(path: Path, including: tuple[Path, ...]) -> ConfigError:
    """Build the error of a missing file; its remedy names files beside it and, for a default, shipped ones.

    It never names a file whose defaults led to ``path``.
    """
    folders = [path.parent]
    if including and path.is_relative_to(including[-1].parent):
        inside = path.relative_to(including[-1].parent).parent
        folders.append(_shipped_folder(including) / inside)
    there = {other.name: other for folder in reversed(folders) for other in sorted(folder.glob("*.yaml"))}
    candidates = {name: other for name, other in there.items() if other not in including}
    close = get_close_matches(path.name, candidates, n=1, cutoff=0.6)
    named_by = f" (named in the defaults of {including[-1]})" if including else ""
    listed = ", ".join(str(other) for other in candidates.values()) or "no YAML files there"
    remedy = f"did you mean {candidates[close[0]]}?" if close else f"there are {listed}"
    return _file_error(path, f"is not a file{named_by}", remedy)


def _with_suffix(path: Path) -> Path:
    return path if path.suffix in (".yaml", ".yml") else path.with_name(path.name + ".yaml")


def _file_error(path: Path, rule: str, remedy: str) -> ConfigError:
    return ConfigError([Problem(key=str(path), rule=rule, remedy=remedy)])


@dataclass(slots=True)
class _Draft:
    """A configuration while it is put together; ``sources`` says which file or argument set each key last."""

    tree: dict[str, Any] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)

    def add_layer(self, layer: _Layer) -> None:
        found = fields.check_tree(layer.tree, Config, layer.where, root=Config)
        self.problems += found
        if not found:
            self._set("", layer.tree, layer.where)

    def apply(self, argument: str) -> None:
        where = f"argument {argument!r}"
        try:
            (override,) = OverridesParser.create().parse_overrides([argument])
            found = self._refuse(override, where)
        except HydraException:
            remedy = (
                "write key=value, +key=value, ++key=value or ~key, and quote values with special characters"
            )
            found = [Problem(key=where, rule="cannot be read", remedy=remedy)]
        self.problems += found
        if not found:
            value = None if override.is_delete() else override.value()
            self._set(override.key_or_group, value, where)

    def _refuse(self, override: Override, where: str) -> list[Problem]:
        """Return why this argument cannot be applied; empty when it can."""
        key = override.key_or_group
        annotation = fields.find(Config, key)
        if annotation is None:
            return [fields.unknown_key(key, where, root=Config)]
        if override.package is not None or override.is_sweep_override():
            rule = "takes one value here, not a sweep or a package"
            return [Problem(key=key, rule=rule, remedy="", where=where)]
        if (whole := self._list_above(key)) is not None:
            remedy = f"give the whole list: {whole}=[{{...}}, {{...}}]"
            rule = f"cannot be set, because {whole} is a list"
            return [Problem(key=key, rule=rule, remedy=remedy, where=where)]
        current = reduce(getitem, key.split("."), self.tree) if key in self.sources else _MISSING
        if override.is_delete():
            return _refuse_deletion(override, annotation, current, where)
        if override.is_add() and not override.is_force_add() and current != _MISSING:
            remedy = f"write {key}=... to change it, or ++{key}=... to set it in any case"
            return [Problem(key=key, rule=f"already has the value {current!r}", remedy=remedy, where=where)]
        return fields.check_value(key, override.value(), annotation, where, Config)

    def _list_above(self, key: str) -> str | None:
        """Return the full key of the list that ``key`` would reach into; None when it reaches into none."""
        target: Any = self.tree
        names = key.split(".")
        for depth, name in enumerate(names[:-1], start=1):
            target = target.get(name) if isinstance(target, dict) else None
            if isinstance(target, list):
                return ".".join(names[:depth])
        return None

    def finish(self, path: str) -> Config:
        self._raise_problems()
        complete_lists(self.tree, Config)
        unresolved = OmegaConf.create(self.tree)
        for key, value in interpolations("", self.tree):
            self.problems += self._check_interpolation(unresolved, key, value)
        self._raise_problems()
        container = OmegaConf.to_container(unresolved, resolve=True)
        assert isinstance(container, dict)
        resolved = {str(name): value for name, value in container.items()}
        make_lists(resolved, Config)
        for problem in fields.check_tree(resolved, Config, path, root=Config):
            source = self.sources.get(problem.key.partition("=")[0], path)
            self.problems.append(replace(problem, where=source))
        self.problems += _missing(resolved, Config, "", path)
        self._raise_problems()
        typed = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), resolved))
        assert isinstance(typed, Config)
        return typed

    def _check_interpolation(self, tree: DictConfig, key: str, value: str) -> list[Problem]:
        try:
            OmegaConf.select(tree, key, throw_on_missing=True, throw_on_resolution_failure=True)
        except (OmegaConfBaseException, ValueError) as error:
            rule = f"cannot be resolved: {str(error).splitlines()[0]}"
            return [Problem(key=f"{key}={value}", rule=rule, remedy="", where=self.sources.get(key, ""))]
        return []

    def _set(self, prefix: str, value: Any, where: str) -> None:
        """Put the leaves of ``value`` into the tree, beside what is there already."""
        for key, leaf in _leaves(prefix, value):
            *groups, name = key.split(".")
            target = self.tree
            for group in groups:
                if not isinstance(target.get(group), dict):
                    target[group] = {}
                target = target[group]
            if isinstance(leaf, Mapping):
                # An empty mapping: keys that the tree has here already stay.
                target.setdefault(name, {})
            else:
                target[name] = leaf
            self.sources[key] = where

    def _raise_problems(self) -> None:
        if self.problems:
            raise ConfigError(self.problems)


def _refuse_deletion(override: Override, annotation: Any, current: Any, where: str) -> list[Problem]:
    key, expected = override.key_or_group, override.value()
    if not fields.is_optional(annotation):
        remedy = f"give it another with {key}=..."
        return [Problem(key=key, rule="must have a value and cannot be removed", remedy=remedy, where=where)]
    if expected is not None and expected != current:
        return [
            Problem(key=key, rule=f"is {current!r}, not {expected!r}", remedy=f"write ~{key}", where=where)
        ]
    return []


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yield (full key, value) of everything below ``prefix`` that is not a mapping with keys."""
    if isinstance(value, Mapping) and (value or not prefix):
        for name, inner in value.items():
            yield from _leaves(f"{prefix}.{name}" if prefix else str(name), inner)
    else:
        yield prefix, value


def _missing(tree: Any, group: type, prefix: str, path: str) -> Iterator[Problem]:
    for name, annotation in fields.hints(group).items():
        key, is_group = f"{prefix}{name}", fields.is_group(annotation)
        if name not in tree or tree[name] == _MISSING:
            remedy = f"set {'its keys' if is_group else 'it'} in {path}" + (
                f", or add `- {key}: default` to its defaults"
                if is_group and not prefix
                else " or on the command line"
            )
            yield Problem(key=key, rule="has no value", remedy=remedy, where=path)
        elif is_group and isinstance(tree[name], Mapping):
            yield from _missing(tree[name], annotation, f"{key}.", path)
        elif entry := fields.entry_group(annotation):
            for entry_name, keys in tree[name].items():
                yield from _missing(keys, entry, f"{key}.{entry_name}.", path)
        else:
            yield from (
                Problem(
                    key=leaf,
                    rule="has no value",
                    remedy=f"set it in {path} or on the command line",
                    where=path,
                )
                for leaf, value in _leaves(key, tree[name])
                if value == _MISSING
            )
