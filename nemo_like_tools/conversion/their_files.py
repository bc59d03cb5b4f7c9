"""Reads a configuration of another framework in the way in which that framework composes it.

A file whose ``defaults`` are paths builds on those files (NeMo-RL). A file whose ``defaults`` have groups is
composed by Hydra (verl). A file without ``defaults`` holds everything, such as the output of verl's ``--cfg
job``. Of a shell script the arguments of its call of verl's trainer are read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from nemo_like.config.composition import HYDRA_VERSION
from nemo_like.config.grammar import parse
from nemo_like.config.other_frameworks import table_of
from nemo_like.config.problems import ConfigError, Problem
from nemo_like.config.resolvers import register_resolvers
from nemo_like.config.search_path import near_files
from nemo_like_tools.conversion.shell_script import HOME, Script, read_script
from nemo_like_tools.conversion.values import Theirs

_OVERRIDE = "_override_"
_ENGINE = "model_engine"  # verl's group that chooses the backend


def read_theirs(path: Path, arguments: Sequence[str]) -> tuple[Theirs, list[Problem]]:
    """Return the configuration of a file with ``key=value`` arguments applied, and problems of unresolvable
    values.

    The configuration lacks these values. Raises ConfigError when the file or an argument cannot be read.
    """
    problems: list[Problem] = []
    defaults: Mapping[str, Any] = {}
    with _resolvers():
        if path.suffix == ".sh":
            script = read_script(path)
            defaults = _defaults(script, arguments)
            arguments = _with_script(script, path, arguments, problems)
            cfg = _guarded(path, lambda: _with_arguments(_tree(defaults), arguments))
        else:
            cfg = _guarded(path, lambda: _composed(path, arguments))
        tree = dict(_resolved(cfg, "", str(path), problems))
    given = [f"{_key(argument)}." for argument in arguments]
    assumed = [key for key in defaults if not f"{key}.".startswith(tuple(given))]
    return Theirs(tree, lambda name: _text(name, path), assumed, _rows), problems


@contextmanager
def _resolvers() -> Iterator[None]:
    """Register the resolvers that files of other frameworks use, for the ``with`` block."""
    register_resolvers()
    OmegaConf.register_new_resolver("max", lambda *values: max(values), replace=True)
    try:
        yield
    finally:
        OmegaConf.clear_resolver("max")


def _composed(path: Path, arguments: Sequence[str]) -> DictConfig:
    cfg = _load(path)
    entries = cfg.get("defaults")
    is_hydras = OmegaConf.is_list(entries) and any(
        OmegaConf.is_dict(entry) or entry == "_self_" for entry in entries
    )
    if is_hydras:
        with hydra.initialize_config_dir(os.path.abspath(path.parent), version_base=HYDRA_VERSION):
            return hydra.compose(path.stem, list(arguments))
    return _with_arguments(_inherited(path, ()), arguments)


def _defaults(script: Script, arguments: Sequence[str]) -> Mapping[str, Any]:
    """Return verl's defaults for a script, which may choose a configuration for Megatron.

    A key that the script sets to something that cannot be known has none.
    """
    defaults = dict(table_of("verl").defaults)
    chosen = {script.config_name.partition("_")[2].partition("_")[0]}
    chosen |= {text.partition("=")[2] for text in (*script.arguments, *arguments) if _key(text) == _ENGINE}
    if "megatron" in chosen:
        defaults["actor_rollout_ref.actor.strategy"] = "megatron"
    unknown = {_key(word) for word in script.unknown}
    return {key: value for key, value in defaults.items() if key not in unknown}


def _tree(values: Mapping[str, Any]) -> DictConfig:
    """Return values by full key as a tree."""
    cfg = OmegaConf.create()
    for key, value in values.items():
        OmegaConf.update(cfg, key, value)
    return cfg


def _with_script(script: Script, path: Path, arguments: Sequence[str], problems: list[Problem]) -> list[str]:
    """Return the arguments of a script's call with those given after them, as the script's ``$@`` has them.

    Adds a problem for each argument of the script whose value cannot be known and that is not given.
    """
    given = {_key(text) for text in arguments}
    for word, why in script.unknown.items():
        key = _key(word)
        if "=" in word and key in given:
            continue
        rule = f"cannot be known without running the script: {why}"
        remedy = f"add the argument {key}=VALUE" if "=" in word else "add its key=value arguments"
        problems.append(Problem(key=word, rule=rule, remedy=remedy, where=str(path)))
    return [*script.arguments, *arguments]


def _key(argument: str) -> str:
    return argument.partition("=")[0].lstrip("+~")


def _guarded(path: Path, compose: Callable[[], DictConfig]) -> DictConfig:
    """Return what ``compose`` returns; raise ConfigError in place of the libraries' errors."""
    try:
        return compose()
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        rule = f"cannot be composed: {' '.join(str(error).split())}"
        remedy = "give the whole configuration, which their launcher prints with --cfg job, as one file"
        raise ConfigError.of(str(path), rule, remedy) from error


def _load(path: Path) -> DictConfig:
    if not path.is_file():
        remedy = near_files(path.name, path.parent)
        raise ConfigError.of(str(path), "is not a file", remedy)
    try:
        cfg = OmegaConf.load(path)
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        rule = f"is not valid YAML: {' '.join(str(error).split())}"
        raise ConfigError.of(str(path), rule) from error
    if not isinstance(cfg, DictConfig):
        raise ConfigError.of(str(path), "must be a mapping of keys, not a list")
    return cfg


def _inherited(path: Path, before: tuple[Path, ...]) -> DictConfig:
    """Return a file merged over the files that its defaults name by paths."""
    if path in before:
        rule = f"is reached from itself by its defaults: {' -> '.join(map(str, (*before, path)))}"
        raise ConfigError.of(str(path), rule, "break the circle")
    cfg = _load(path)
    names = cfg.pop("defaults", None) or []
    merged = OmegaConf.create({})
    for name in [names] if isinstance(names, str) else names:
        parent = _inherited((path.parent / str(name)).resolve(), (*before, path))
        merged = _merged(merged, parent)
    return _merged(merged, cfg)


def _merged(below: DictConfig, above: DictConfig) -> DictConfig:
    """Merge ``above`` over ``below``; a group of ``above`` with ``_override_`` replaces that of ``below``."""
    for name in list(above):
        if OmegaConf.is_missing(above, name) or OmegaConf.is_interpolation(above, name):
            continue
        group = above[name]
        if isinstance(group, DictConfig) and group.get(_OVERRIDE):
            group.pop(_OVERRIDE)
            below.pop(name, None)
    merged = OmegaConf.merge(below, above)
    assert isinstance(merged, DictConfig)
    return merged


def _with_arguments(cfg: DictConfig, arguments: Sequence[str]) -> DictConfig:
    for text in arguments:
        argument = parse(text)
        if argument.is_sweep_override():
            rule = "sets several values, and a configuration has one"
            raise ConfigError.of(text, rule, "convert once for each value")
        if argument.is_delete():
            group, _, name = argument.key_or_group.rpartition(".")
            holder = OmegaConf.select(cfg, group) if group else cfg
            if holder is not None:
                holder.pop(name, None)
        else:
            OmegaConf.update(cfg, argument.key_or_group, argument.value(), force_add=True)
    return cfg


def _resolved(cfg: DictConfig, prefix: str, path: str, problems: list[Problem]) -> Iterator[tuple[str, Any]]:
    """Yield the names of a group with their plain values, with interpolations resolved."""
    for name in map(str, cfg):
        key = f"{prefix}{name}"
        try:
            value = "???" if OmegaConf.is_missing(cfg, name) else cfg[name]
            if isinstance(value, DictConfig):
                value = dict(_resolved(value, f"{key}.", path, problems))
            elif OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True)
            value = _with_tilde(value)
        except (OmegaConfBaseException, ValueError, TypeError) as error:
            rule = f"cannot be resolved: {str(error).splitlines()[0]}"
            remedy = f"add the argument {key}=VALUE"
            problems.append(Problem(key=key, rule=rule, remedy=remedy, where=path))
            continue
        yield name, value


def _with_tilde(value: Any) -> Any:
    """Return a value with "~" for the mark that stands for the home directory in a script."""
    if isinstance(value, list):
        return [_with_tilde(each) for each in value]
    return value.replace(HOME, "~") if isinstance(value, str) else value


def _rows(name: str) -> int | None:
    """Return the number of rows of a Parquet file or of lines of a JSON lines file; None without one."""
    path = Path(name).expanduser()
    if not path.is_file():
        return None
    if path.suffix == ".jsonl":
        with path.open("rb") as file:
            return sum(1 for line in file if line.strip())
    if path.suffix != ".parquet":
        return None
    from pyarrow import ArrowException
    from pyarrow.parquet import read_metadata

    try:
        return int(read_metadata(path).num_rows)
    except (ArrowException, OSError):
        return None


def _text(name: str, path: Path) -> str | None:
    """Return the text of the file ``name``, relative to the root of ``path``'s repository; else None."""
    for folder in [path.resolve().parent, *path.resolve().parents]:
        if (folder / name).is_file():
            return (folder / name).read_text(encoding="utf-8")
    return None
