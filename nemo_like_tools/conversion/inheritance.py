"""Merges YAML files that build on each other, as NeMo-RL does, and says of each key which file has set it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from nemo_like.config.other_frameworks import table_of
from nemo_like.config.problems import ConfigError
from nemo_like.config.search_path import near_files

BY_DEFAULT = "by default"
_OVERRIDE = "_override_"
# The file of NeMo-RL on which its examples build; the table has its values for those who have no copy of it.
_BASE = "grpo_math_1B"


@dataclass(slots=True)
class Origins:
    """Who set the keys of a configuration: layers of full keys, the lowest first, each with a phrase."""

    layers: list[tuple[str, list[str]]] = field(default_factory=list)

    def add(self, phrase: str, keys: Iterable[str]) -> None:
        """Add the keys that a file, or the arguments, set above all others."""
        self.layers.append((phrase, list(keys)))

    def __call__(self, key: str) -> str:
        """Return the phrase for the highest layer that has the key, a part of it or its group."""
        for phrase, keys in reversed(self.layers):
            if any(f"{each}.".startswith(f"{key}.") or f"{key}.".startswith(f"{each}.") for each in keys):
                return phrase
        return ""


def tree_of(values: Mapping[str, Any]) -> DictConfig:
    """Return values by full key as a tree."""
    cfg = OmegaConf.create()
    for key, value in values.items():
        OmegaConf.update(cfg, key, value)
    return cfg


def load(path: Path) -> DictConfig:
    """Return the mapping in a YAML file. Raises ConfigError when there is none."""
    if not path.is_file():
        raise ConfigError.of(str(path), "is not a file", near_files(path.name, path.parent))
    try:
        cfg = OmegaConf.load(path)
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError, OSError) as error:
        rule = f"is not valid YAML: {' '.join(str(error).split())}"
        raise ConfigError.of(str(path), rule) from error
    if not isinstance(cfg, DictConfig):
        raise ConfigError.of(str(path), "must be a mapping of keys, not a list")
    return cfg


def inherited(path: Path, origins: Origins, before: tuple[Path, ...] = ()) -> DictConfig:
    """Return a file merged over the files that its ``defaults`` name by paths.

    Adds what each file sets to ``origins``. Raises ConfigError for a file that is missing, except NeMo-RL's
    grpo_math_1B.yaml, and for a circle.
    """
    if path in before:
        rule = f"is reached from itself by its defaults: {' -> '.join(map(str, (*before, path)))}"
        raise ConfigError.of(str(path), rule, "break the circle")
    if before and not path.is_file() and path.stem == _BASE:
        defaults = table_of("nemo_rl").defaults
        origins.add(BY_DEFAULT, defaults)
        return tree_of(defaults)
    cfg = load(path)
    names = cfg.pop("defaults", None) or []
    merged = OmegaConf.create({})
    for name in [names] if isinstance(names, str) else names:
        merged = _merged(merged, inherited((path.parent / str(name)).resolve(), origins, (*before, path)))
    origins.add(f"in {path.name}" if before else "", _leaves(cfg))
    return _merged(merged, cfg)


def _leaves(cfg: DictConfig, prefix: str = "") -> Iterator[str]:
    """Yield the full keys of a configuration that are no groups, and those of empty groups."""
    for name in map(str, cfg):
        is_plain = OmegaConf.is_missing(cfg, name) or OmegaConf.is_interpolation(cfg, name)
        if not is_plain and isinstance(cfg[name], DictConfig) and cfg[name]:
            yield from _leaves(cfg[name], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


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
