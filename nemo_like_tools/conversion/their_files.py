"""Reads a configuration of another framework in the way in which that framework composes it.

A file whose ``defaults`` are paths builds on those files (NeMo-RL). A file whose ``defaults`` have groups is
composed by Hydra (verl). A file without ``defaults`` holds everything, such as the output of verl's ``--cfg
job``; one with TRL's arguments is completed by TRL's defaults. Of a shell script the call of a trainer is
read, which may name such a file.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import safe_load

from nemo_like.config.composition import HYDRA_VERSION
from nemo_like.config.grammar import parse
from nemo_like.config.other_frameworks import table_of
from nemo_like.config.problems import ConfigError, Problem
from nemo_like.config.resolvers import register_resolvers
from nemo_like_tools.conversion.inheritance import BY_DEFAULT, Origins, inherited, load, tree_of
from nemo_like_tools.conversion.shell_script import HOME, Script, read_script, script_of
from nemo_like_tools.conversion.values import Theirs

_ENGINE = "model_engine"  # verl's group that chooses the backend


def read_theirs(path: Path, arguments: Sequence[str]) -> tuple[Theirs, list[Problem]]:
    """Return the configuration of a file with arguments applied, and problems of unresolvable values.

    Arguments are ``key=value``, or TRL's ``--key value``. The configuration lacks the values with a problem.
    Raises ConfigError when the file or an argument cannot be read.
    """
    problems: list[Problem] = []
    origins = Origins()
    given = script_of("", arguments)
    with _resolvers():
        script = read_script(path) if path.suffix == ".sh" else None
        if script is not None:
            problems += _unknown(script, path, given)
        cfg = _guarded(path, lambda: _tree(path, script, given, origins))
        tree = dict(_resolved(cfg, "", str(path), problems))
    return Theirs(tree, lambda name: _text(name, path), origins, _rows), problems


@contextmanager
def _resolvers() -> Iterator[None]:
    """Register the resolvers that files of other frameworks use, for the ``with`` block."""
    register_resolvers()
    OmegaConf.register_new_resolver("max", lambda *values: max(values), replace=True)
    try:
        yield
    finally:
        OmegaConf.clear_resolver("max")


def _tree(path: Path, script: Script | None, given: Script, origins: Origins) -> DictConfig:
    """Return the configuration of a YAML file, or of a script's call, with all arguments applied."""
    calls = [given] if script is None else [script, given]
    arguments = [argument for call in calls for argument in call.arguments]
    options = {name: values for call in calls for name, values in (call.launcher | call.options).items()}
    if script is not None and "main_" in script.program:
        _refuse(given.options)
        cfg = _defaults("verl", _defaults_of_verl(script, given), OmegaConf.create(), origins)
    else:
        file = path if script is None else _configuration(script, path, options)
        if file is None:
            cfg = OmegaConf.create()
        elif _is_hydras(cfg := load(file)):
            _refuse(given.options)
            with hydra.initialize_config_dir(os.path.abspath(file.parent), version_base=HYDRA_VERSION):
                return hydra.compose(file.stem, arguments)
        else:
            cfg = inherited(file, origins)
        cfg = _completed(cfg, options, origins, is_call=file is None)
    origins.add("", map(_key, arguments))
    return _with_arguments(cfg, arguments)


def _is_hydras(cfg: DictConfig) -> bool:
    """Return whether a file's ``defaults`` are Hydra's, not names of files."""
    entries = cfg.get("defaults")
    return bool(
        OmegaConf.is_list(entries) and any(OmegaConf.is_dict(one) or one == "_self_" for one in entries)
    )


def _configuration(script: Script, path: Path, options: dict[str, list[str]]) -> Path | None:
    """Return the file that a call names by ``--config``; None when it names none."""
    names = options.pop("config", [])
    if not names:
        return None
    name = Path(names[-1].replace(HOME, "~")).expanduser()
    folders = [path.resolve().parent, *path.resolve().parents]
    return next((folder / name for folder in folders if (folder / name).is_file()), folders[0] / name)


def _completed(
    cfg: DictConfig, options: Mapping[str, list[str]], origins: Origins, *, is_call: bool
) -> DictConfig:
    """Return a configuration of TRL with its options, over TRL's defaults; any other one as it is.

    A call that names neither a file nor an option of TRL has the defaults of NeMo-RL.
    """
    trl = table_of("trl")
    if {*cfg, *options} & trl.keys.keys():
        cfg = _defaults("trl", trl.defaults, cfg, origins)
        for name, values in options.items():
            items = [_scalar(text) for text in values]
            OmegaConf.update(
                cfg, name, items if len(items) > 1 else items[0] if items else True, force_add=True
            )
        origins.add("", options)
        return cfg
    _refuse(options)
    return _defaults("nemo_rl", table_of("nemo_rl").defaults, cfg, origins) if is_call else cfg


def _refuse(options: Mapping[str, list[str]]) -> None:
    """Raise ConfigError for an option, which a configuration that is not TRL's does not take."""
    for name in options:
        raise ConfigError.of(f"--{name}", "is an argument of TRL alone", "write KEY=VALUE")


def _defaults(name: str, values: Mapping[str, Any], cfg: DictConfig, origins: Origins) -> DictConfig:
    """Return a configuration over the defaults of a framework."""
    origins.layers.insert(0, (BY_DEFAULT, list(values)))
    merged = OmegaConf.merge(tree_of(values), cfg)
    assert isinstance(merged, DictConfig)
    return merged


def _scalar(text: str) -> Any:
    """Return the value of a word of a command line."""
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    is_yaml = text[:1] in ("[", "{") or text.lower() in ("true", "false")
    return safe_load(text) if is_yaml else text


def _defaults_of_verl(script: Script, given: Script) -> Mapping[str, Any]:
    """Return verl's defaults for a script, which may choose a configuration for Megatron.

    A key that the script sets to something that cannot be known has none.
    """
    defaults = dict(table_of("verl").defaults)
    chosen = {name.partition("_")[2].partition("_")[0] for name in script.options.get("config_name", ())}
    words = (*script.arguments, *given.arguments)
    chosen |= {text.partition("=")[2] for text in words if _key(text) == _ENGINE}
    if "megatron" in chosen:
        defaults["actor_rollout_ref.actor.strategy"] = "megatron"
    unknown = {_key(word) for word in script.unknown}
    return {key: value for key, value in defaults.items() if key not in unknown}


def _unknown(script: Script, path: Path, given: Script) -> Iterator[Problem]:
    """Yield a problem for each argument of a script whose value cannot be known and that is not given."""
    is_given = {*map(_key, given.arguments), *(f"--{name}" for name in given.options)}
    for word, why in script.unknown.items():
        key = _key(word)
        if key in is_given:
            continue
        rule = f"cannot be known without running the script: {why}"
        value = f"{key} VALUE" if word.startswith("--") else f"{key}=VALUE"
        remedy = f"add the argument {value}" if "=" in word else "add its key=value arguments"
        if re.fullmatch(r"\$\w+", word):
            remedy = f"put {word[1:]}=VALUE before the command"
        yield Problem(key=word, rule=rule, remedy=remedy, where=str(path))


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
