"""Composes a configuration with Hydra, and says which file gave each of its keys."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from functools import reduce
from pathlib import Path
from typing import Any, TypeVar

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nemo_like.config.earlier_keys import with_todays_keys
from nemo_like.config.grammar import Override, parse, without_sweep
from nemo_like.config.nodes import merged
from nemo_like.config.problems import ConfigError, Problem
from nemo_like.config.remembered import remembered
from nemo_like.config.search_path import (
    defaults_alone,
    file_of,
    first_file,
    folder_of,
    folders_behind,
    lists_as_text,
    lists_from_text,
    locations_in,
    near_files,
    read_configuration,
    search_path_argument,
    searching,
)

_Found = TypeVar("_Found")

_HYDRAS_SWEEP_DIRECTORY = "multirun/${now:%Y-%m-%d}/${now:%H-%M-%S}"
HYDRA_VERSION = "1.3"  # Hydra behaves as this version
# Hydra's plugins of the extra ``sweep`` (pyproject.toml), by group.
_PLUGINS = {"hydra/launcher": ("joblib", "submitit_local", "submitit_slurm"), "hydra/sweeper": ("optuna",)}


@dataclass(frozen=True, slots=True)
class Layer:
    """The keys that one file or argument (``where``) sets, as a tree from the root of the configuration."""

    where: str
    tree: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class SweepSettings:
    """The settings of a sweep in Hydra's own group of keys, ``hydra``."""

    directory: str  # has the runs' directories: hydra.sweep.dir if set, else a new one in logger.log_dir
    sweeper: str  # the choice of hydra/sweeper; "basic" makes every combination
    in_files: list[str]  # hydra.sweeper.params as arguments, except entries that only the sweeper can read


@contextmanager
def composing(path: Path) -> Iterator[Composition]:
    """Start Hydra for the file ``path``, and yield its Composition, which works only inside the ``with``
    block.

    Raises ConfigError when there is no such file.
    """
    folder, name = path.parent, path.stem if path.suffix in (".yaml", ".yml") else path.name
    if not file_of(folder, name).is_file():
        rule = "is no YAML file (.yaml or .yml)" if path.is_file() else "is not a file"
        raise ConfigError.of(str(path), rule, near_files(path.name, folder))
    further = folders_behind(file_of(folder, name))
    with searching(further), hydra.initialize_config_dir(os.path.abspath(folder), version_base=HYDRA_VERSION):
        yield Composition(name, [folder, *further])


class Composition:
    """Hydra, started on one configuration file. Methods raise ConfigError where Hydra cannot compose it."""

    def __init__(self, name: str, folders: Sequence[Path]) -> None:
        self._name, self._own_folders = name, list(folders)
        self._folders, self._search_path = self._own_folders, list[str]()
        self._arguments: dict[str, Override] = {}
        self._loader = GlobalHydra.instance().config_loader()
        with self._errors_as_problems():
            self.search(locations_in(file_of(folders[0], name)))

    def search(self, locations: Sequence[str]) -> None:
        """Have Hydra also look in ``locations``, folders or packages (pkg://NAME); replaces earlier ones."""
        self._search_path = [search_path_argument(locations)] if locations else []
        self._folders = [*self._own_folders, *map(folder_of, locations)]

    def parse(self, argument: str) -> Override:
        """Read an argument. Raises HydraException when it does not follow Hydra's grammar."""
        if argument not in self._arguments:
            self._arguments[argument] = parse(argument, self._loader)
        return self._arguments[argument]

    def options(self, group: str) -> list[str]:
        """Return the configurations of a group, by name; empty when there is no such group."""

        def found() -> list[str]:
            return self._loader.get_group_options(group, config_name=self._name, overrides=self._search_path)

        # Hydra's plugins are no files.
        options = found() if group.startswith("hydra/") else self._remembered(("options", group), found)
        return [option for option in options if not option.startswith("_")]

    def choices(self) -> set[str]:
        """Return the groups that the file's defaults choose from, such as "policy" and "env@env.math"."""
        with self._errors_as_problems():
            return set(self._defaults(()).overrides.known_choices)

    def layers(self, arguments: Sequence[str]) -> list[Layer]:
        """Return the keys that each file sets, a winning file after the files that it overrides.

        ``arguments`` choose configurations of groups, such as "policy=fsdp".
        """
        with self._errors_as_problems():
            defaults = self._defaults(arguments).defaults
        layers = []
        for entry in defaults:
            if entry.config_path.startswith("hydra/"):
                continue
            file = self._file(entry.config_path)
            tree = {**read_configuration(file, entry.config_path).tree}
            tree.pop("hydra", None)
            layers.append(Layer(str(file), with_todays_keys(nested(entry.package or "", tree), str(file))))
        return layers

    def placed_at(self, key: str) -> Iterator[tuple[str, Path]]:
        """Yield each configuration that defaults put at ``key`` itself, such as "env/f1", with their file."""
        with self._errors_as_problems():
            defaults = self._defaults(()).defaults
        for entry in defaults:
            if entry.package == key and not str(entry.parent).startswith(f"{key}/"):
                yield entry.config_path, self._file(entry.parent)

    def default_of(self, config_path: str) -> Mapping[str, Any]:
        """Return the keys of one file of a group, such as "policy/default"; empty without such a file."""
        file = self._file(config_path)
        return read_configuration(file, config_path).tree if file.is_file() else {}

    def compose(self, layers: Sequence[Layer], arguments: Sequence[str]) -> dict[str, Any]:
        """Merge the layers of files, apply the ``arguments`` that set values, and return the tree of plain
        values.

        Interpolations stay unresolved. The result equals that of ``hydra.compose``, which would read all
        files again.
        """
        with self._errors_as_problems():
            composed = merged([lists_as_text(layer.tree) for layer in layers])
            for argument in map(self.parse, arguments):
                if argument.is_delete():
                    group, _, name = argument.key_or_group.rpartition(".")
                    OmegaConf.select(composed, group).pop(name)
                else:
                    OmegaConf.update(composed, argument.key_or_group, argument.value(), force_add=True)
            tree = OmegaConf.to_container(composed, resolve=False)
        assert isinstance(tree, dict)
        return {str(key): lists_from_text(value) for key, value in tree.items()}

    @property
    def search_path(self) -> list[str]:
        """The argument that names the further locations to Hydra, in a list; empty without any."""
        return list(self._search_path)

    def sweep_settings(self, arguments: Sequence[str]) -> SweepSettings:
        """Return the settings of a sweep that the files and the arguments give."""
        with self._errors_as_problems():
            given = [*self._search_path, *self.first_alternatives(arguments)]
            composed = hydra.compose(self._name, given, return_hydra_config=True)
            sweep, params = composed.hydra.sweep, composed.hydra.sweeper.get("params") or {}
            written = OmegaConf.to_yaml(sweep, resolve=False)
            if _HYDRAS_SWEEP_DIRECTORY in written:
                sweep.dir = "${logger.log_dir}/sweep-${now:%Y%m%d-%H%M%S}"
            return SweepSettings(
                directory=str(sweep.dir),
                sweeper=str(composed.hydra.runtime.choices["hydra/sweeper"]),
                in_files=[
                    f"{key}={value}" for key, value in params.items() if not OmegaConf.is_config(value)
                ],
            )

    def first_alternatives(self, arguments: Sequence[str]) -> list[str]:
        """Return arguments without sweeps: each keeps its first alternative, or the start of its interval."""
        return [without_sweep(self.parse(argument)) for argument in arguments]

    def _defaults(self, arguments: Sequence[str]) -> Any:
        def found() -> Any:  # which takes most of a configuration's time
            given = [*self._search_path, *arguments]
            with defaults_alone():
                return self._loader.compute_defaults_list(self._name, given, RunMode.RUN)

        return self._remembered(("defaults", *arguments), found)

    def _remembered(self, what: tuple[str, ...], found: Callable[[], _Found]) -> _Found:
        folders = tuple(map(os.path.abspath, self._own_folders))
        return remembered((what, tuple(self._search_path), self._name, folders), found)

    @contextmanager
    def _errors_as_problems(self) -> Iterator[None]:
        """Turn Hydra's errors inside the ``with`` block into a ConfigError."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", message=".*is not available")
                yield
        except UserWarning as error:
            rule = f"cannot be composed: {error}"
            raise ConfigError([self._problem(rule, "name folders that are there")]) from error
        except MissingConfigException as error:
            raise ConfigError([self._missing(error)]) from error
        except RecursionError as error:
            chain = " -> ".join(map(str, self._circle(self._name, ())))
            rule = f"is reached from itself by its defaults: {chain}"
            raise ConfigError([self._problem(rule, "break the circle")]) from error
        except (HydraException, OmegaConfBaseException, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            cause = f" ({error.__cause__})" if error.__cause__ is not None else ""
            reason = " ".join(f"{error}{cause}".split())
            raise ConfigError([self._problem(f"cannot be composed: {reason}", _remedy(reason))]) from error

    def _problem(self, rule: str, remedy: str) -> Problem:
        return Problem(key=str(file_of(self._folders[0], self._name)), rule=rule, remedy=remedy)

    def _missing(self, error: MissingConfigException) -> Problem:
        """Build the problem of a file that defaults name but no folder has; the remedy names the nearest."""
        missing = str(error.missing_cfg_file)
        group, _, name = missing.rpartition("/")
        options = self.options(group)
        if group.startswith("hydra/"):
            return _missing_plugin(group, name, options)
        files = {option: self._file(f"{group}/{option}" if group else option) for option in options}
        named_by = re.search(r"In '([^']+)'", str(error))
        parent = self._file(named_by[1]) if named_by else None
        others = {option: file for option, file in files.items() if file != parent}
        close = get_close_matches(name, others, n=1, cutoff=0.6)
        listed = ", ".join(map(str, others.values())) or "none"
        remedy = f"did you mean {others[close[0]]}?" if close else f"there are {listed}"
        rule = "is not a configuration" + (f" (named in the defaults of {parent})" if parent else "")
        return Problem(key=missing, rule=rule, remedy=remedy)

    def _file(self, config_path: str) -> Path:
        return first_file(self._folders, config_path) or file_of(self._folders[0], config_path)

    def _circle(self, config_path: str, before: tuple[str, ...]) -> tuple[Path, ...]:
        """Return the files of a circle of defaults, the first file again at the end; empty without a
        circle."""
        if config_path in before:
            names = (*before[before.index(config_path) :], config_path)
            return tuple(self._file(name) for name in names)
        for entry in read_configuration(self._file(config_path), config_path).defaults:
            below = _config_path(entry, os.path.dirname(config_path))
            is_there = entry != "_self_" and self._file(below).is_file()
            if is_there and (circle := self._circle(below, (*before, config_path))):
                return circle
        return ()


def _config_path(entry: str | Mapping[str, Any], folder: str) -> str:
    """Return the configuration that an entry of the defaults names, in a file of the group ``folder``."""
    if isinstance(entry, Mapping):
        ((group, name),) = entry.items()
        entry = f"{group.split()[-1].partition('@')[0]}/{name}"
    return os.path.join("/", folder, entry.partition("@")[0]).removeprefix("/")


def _missing_plugin(group: str, name: str, options: Sequence[str]) -> Problem:
    """Build the problem of a Hydra plugin that is not installed, or that does not exist."""
    of_extra = _PLUGINS.get(group, ())
    if name in of_extra:
        rule = "is a plugin of Hydra's that is not installed"
        remedy = "the extra `sweep` has it: pip install -e '.[sweep]'"
    else:
        rule, remedy = "is not among Hydra's plugins", f"there are {', '.join(options) or 'none'}"
        if close := get_close_matches(name, [*options, *of_extra], n=1, cutoff=0.6):
            remedy = f"did you mean {close[0]}?"
    return Problem(key=f"{group}={name}", rule=rule, remedy=remedy)


def nested(key: str, value: Any) -> Any:
    """Return a tree in which the full key ``key`` has ``value``; for an empty key, ``value`` itself."""
    return reduce(lambda inner, name: {name: inner}, reversed(key.split(".")), value) if key else value


def _remedy(reason: str) -> str:
    """Return a remedy for the errors of Hydra whose text names none; empty for other errors."""
    if "appears more than once" in reason or "Multiple values" in reason:
        return "name the group once, and write `- override GROUP: NAME` to replace what a default chose"
    return ""
