"""Tells Hydra where configurations are: beside the file that is run, then in ``configs/`` and ``recipes/``.

Hydra reads them through ``ConfigurationFiles``. It accepts three things that Hydra's own reader refuses:
defaults that are not a list, defaults that are paths, and a list of groups of keys (such as several data
sources) where another file has one group.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from difflib import get_close_matches
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from nemo_like.config.problems import ConfigError
from nemo_like.config.remembered import noted

SHIPPED = tuple(Path(__file__).resolve().parents[2] / folder for folder in ("configs", "recipes"))
# A configuration outside of the search path is named by this and the file's absolute path without its suffix.
_ANYWHERE = "__file__"
_SUFFIXES = (".yaml", ".yml")
_PACKAGE_HEADER = re.compile(r"^\s*#\s*@package\s+(\S+)\s*$", re.MULTILINE)
_further_folders: ContextVar[Sequence[Path] | None] = ContextVar("nemo_like_further_folders", default=None)


@contextmanager
def searching(folders: Sequence[Path]) -> Iterator[None]:
    """Make Hydra search ``folders`` too, and read files with this module, in the ``with`` block."""
    for plugin in (ConfigurationFiles, FurtherFolders):
        Plugins.instance().register(plugin)
    token = _further_folders.set(folders)
    try:
        yield
    finally:
        _further_folders.reset(token)


class FurtherFolders(SearchPathPlugin):
    """A Hydra plugin: appends search folders, and has ``ConfigurationFiles`` read every folder."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if (folders := _further_folders.get()) is None:
            return
        for element in search_path.get_path():
            if element.provider in ("main", "hydra"):
                element.path = _as_ours(str(element.path))
        for folder in folders:
            search_path.append("further", _as_ours(str(folder.absolute())))


def folders_behind(file: Path) -> list[Path]:
    """Return the folders to search after the folder of ``file``.

    First come folders to which paths in its defaults lead, directly or through other files, then the shipped
    folders. Raises ConfigError when a file cannot be read.
    """
    folders: dict[Path, None] = {}
    waiting, seen = [(file, "")], set[Path]()
    while waiting:
        file, config_path = waiting.pop()
        if (absolute := file.absolute()) in seen:
            continue
        seen.add(absolute)
        read = read_configuration(file, config_path)
        names = [entry[1:].partition("@")[0] for entry in read.defaults if isinstance(entry, str)]
        for path in (name for name in names if name.startswith(f"{_ANYWHERE}/")):
            target = file_of(Path("/"), path)
            folders[target.parent] = None
            waiting.append((target, path))
    return [*folders, *SHIPPED]


def locations_in(file: Path) -> list[str]:
    """Return the ``hydra.searchpath`` of a configuration file: further locations in which Hydra looks."""
    hydras = read_configuration(file, "").tree.get("hydra")
    locations = hydras.get("searchpath") if isinstance(hydras, Mapping) else None
    return list(OmegaConf.create(locations)) if isinstance(locations, list) else []


def folder_of(location: str) -> Path:
    """Return the folder of a location on a search path: a path, or a package as pkg://NAME."""
    if location.startswith("pkg://"):
        with suppress(ImportError, ValueError):
            spec = find_spec(location.removeprefix("pkg://").strip("/").replace("/", "."))
            if spec is not None and spec.submodule_search_locations:
                return Path(spec.submodule_search_locations[0])
    path = location.removeprefix("file://").removeprefix(f"{ConfigurationFiles.scheme()}://")
    return Path(path).absolute()


def _as_ours(location: str) -> str:
    return f"{ConfigurationFiles.scheme()}://{folder_of(location)}"


def search_path_argument(locations: Sequence[str]) -> str:
    """Return the argument with which Hydra searches ``locations`` and reads their files with this module."""
    return f"hydra.searchpath={json.dumps([_as_ours(location) for location in locations])}"


_KEYS_ARE_WANTED = ContextVar("_KEYS_ARE_WANTED", default=True)


@contextmanager
def defaults_alone() -> Iterator[None]:
    """Give Hydra in the ``with`` block the defaults of files without their keys.

    It would make nodes of thousands of keys, which takes most of the time in which it finds the files.
    """
    token = _KEYS_ARE_WANTED.set(False)
    try:
        yield
    finally:
        _KEYS_ARE_WANTED.reset(token)


def _wanted(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    if _KEYS_ARE_WANTED.get():
        return tree
    # With ``hydra.searchpath`` a file says where Hydra looks.
    return {"hydra": tree["hydra"]} if "hydra" in tree else {}


class ConfigurationFiles(ConfigSource):
    """Hydra's access to the configurations below a folder. Raises ConfigError for an unreadable file."""

    @staticmethod
    def scheme() -> str:
        return "nemo-like"

    def load_config(self, config_path: str) -> ConfigResult:
        read = read_configuration(file_of(Path(self.path), config_path), config_path)
        keys = _for_hydra(_wanted(read.tree), config_path)
        return ConfigResult(
            provider=self.provider,
            path=self.full_path(),
            config=OmegaConf.create({**keys, "defaults": read.defaults}),
            header={"package": read.package},
        )

    def is_config(self, config_path: str) -> bool:
        return file_of(Path(self.path), config_path).is_file()

    def is_group(self, config_path: str) -> bool:
        return noted(Path(self.path, config_path)).is_dir()

    def available(self) -> bool:
        return self.is_group("")

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        found = set()
        for file in noted(Path(self.path, config_path)).iterdir():
            if file.is_dir() and results_filter is not ObjectType.CONFIG:
                found.add(file.name)
            if file.suffix in _SUFFIXES and results_filter is not ObjectType.GROUP:
                found.add(file.stem)
        return sorted(found)


def file_of(folder: Path, config_path: str) -> Path:
    """Return the file of a configuration such as "env/math_verify"; it need not exist."""
    if config_path.startswith(f"{_ANYWHERE}/"):
        folder, config_path = Path("/"), config_path.removeprefix(f"{_ANYWHERE}/")
    files = [folder / f"{config_path.removesuffix('.yaml')}{suffix}" for suffix in _SUFFIXES]
    return next((file for file in files if noted(file).is_file()), files[0])


def first_file(folders: Sequence[Path], config_path: str) -> Path | None:
    """Return the file of a configuration in the first folder that has it; None where none does."""
    files = (file_of(folder, config_path) for folder in folders)
    return next((file for file in files if file.is_file()), None)


class Configuration:
    """The content of one file.

    ``tree`` has its keys as plain values, without ``defaults``. ``defaults`` has the entries as Hydra takes
    them. ``package`` is the package in the file's header, or None.
    """

    def __init__(self, tree: dict[str, Any], defaults: list[Any], package: str | None) -> None:
        self.tree, self.defaults, self.package = tree, defaults, package


def read_configuration(file: Path, config_path: str) -> Configuration:
    """Read the file of the configuration ``config_path``.

    Raises ConfigError when the file is not a YAML mapping of keys, or when an entry of its defaults is
    malformed.
    """
    try:
        seen = file.stat()
    except OSError as error:
        raise _file_error(file, f"cannot be read: {error.strerror}") from error
    package, tree = _parsed(file, seen.st_mtime_ns, seen.st_size)
    keys = dict(tree)
    entries = keys.pop("defaults", None) or []
    entries = [entries] if isinstance(entries, str | Mapping) else entries
    defaults = [_entry(entry, file, config_path) for entry in entries]
    if defaults and "_self_" not in defaults:
        defaults.append("_self_")
    return Configuration(keys, defaults, package)


@lru_cache(maxsize=256)
def _parsed(file: Path, modified_ns: int, size: int) -> tuple[str | None, Mapping[str, Any]]:
    """Parse a file. The cache parses it again only when its time of modification or its size differs."""
    try:
        text = file.read_text(encoding="utf-8")
        loaded = OmegaConf.load(file)
    except (YAMLError, OmegaConfBaseException, UnicodeDecodeError) as error:
        raise _file_error(file, f"is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(loaded, DictConfig):
        raise _file_error(file, "must be a mapping of groups of keys, not a list")
    tree = OmegaConf.to_container(loaded, resolve=False)
    header = _PACKAGE_HEADER.search(text)
    keys = {str(key): value for key, value in tree.items()} if isinstance(tree, dict) else {}
    return header[1] if header else None, keys


def _entry(entry: Any, file: Path, config_path: str) -> Any:
    """Return an entry of a file's defaults, rewritten as Hydra takes it."""
    if isinstance(entry, str):
        return _path_entry(entry, file, config_path)
    if not isinstance(entry, Mapping) or len(entry) != 1:
        rule = f"has an entry {entry!r} in its defaults"
        raise _file_error(file, rule, "an entry is a name or path, one group: name, or one group@key: name")
    ((key, name),) = entry.items()
    *words, group = str(key).split()
    folder, at, package = group.partition("@")
    target = file.parent / folder
    if (".." in Path(folder).parts or folder.startswith("/")) and noted(target).is_dir():
        is_shipped = target.resolve().parent in SHIPPED
        group = (
            f"/{target.name if is_shipped else _ANYWHERE + os.path.abspath(target)}@{package or target.name}"
        )
    elif config_path.startswith(f"{_ANYWHERE}/"):
        group = f"/{folder.removeprefix('/')}{at}{package}"
    return {" ".join([*words, group]): name}


def _path_entry(entry: str, file: Path, config_path: str) -> str:
    """Return an entry that is a text as Hydra takes it: a name loses its suffix, a path leads to its file."""
    name, at, package = entry.partition("@")
    named = _without_suffix(name)
    is_elsewhere = config_path.startswith(f"{_ANYWHERE}/")
    target = file_of(file.parent, named)
    is_path = ".." in Path(name).parts or ((name.startswith("/") or is_elsewhere) and target.is_file())
    if entry == "_self_" or (not is_path and not is_elsewhere):
        return f"{named}{at}{package}"
    if not is_path:
        return f"/{named.removeprefix('/')}{at}{package}"
    if not target.is_file():
        rule = f"is not a file (named in the defaults of {file})"
        raise _file_error(target, rule, near_files(target.name, target.parent))
    if target.resolve().parent in SHIPPED and target.stem != file.stem:
        return f"/{target.stem}@{package or '_here_'}"
    return f"/{_ANYWHERE}{os.path.abspath(_without_suffix(str(target)))}@{package or '_here_'}"


def find_configuration(name: str, folder: str | None = None) -> Path:
    """Return the file of the configuration ``name`` in ``folder``, or else of the shipped one.

    Raises ConfigError when there is neither.
    """
    folders = (*([Path(folder)] if folder is not None else []), *SHIPPED)
    if (file := first_file(folders, _without_suffix(name))) is None:
        raise _file_error(folders[0] / name, "is not a configuration", near_files(f"{name}.yaml", *folders))
    return file


def near_files(name: str, *folders: Path) -> str:
    """Return the remedy for a missing file: the YAML file with the most similar name, or the names of all."""

    there = {other.name: other for folder in reversed(folders) for other in sorted(folder.glob("*.yaml"))}
    if close := get_close_matches(name, there, n=1, cutoff=0.6):
        return f"did you mean {there[close[0]]}?"
    return f"there are {', '.join(map(str, there.values())) or 'no YAML files there'}"


def _without_suffix(name: str) -> str:
    return next((name.removesuffix(suffix) for suffix in _SUFFIXES if name.endswith(suffix)), name)


def _for_hydra(tree: Mapping[str, Any], config_path: str) -> dict[str, Any]:
    """Return a file's tree with lists of groups as text; the keys of Hydra itself stay as they are."""
    if config_path.startswith("hydra/"):
        return dict(tree)
    return {key: value if key == "hydra" else lists_as_text(value) for key, value in tree.items()}


def lists_as_text(value: Any) -> Any:
    """Return a tree in which every list of groups of keys is one JSON text, in bytes unlike
    other texts.

    As one value, a later file replaces the list as a whole instead of merging into it.
    """
    if isinstance(value, Mapping):
        return {key: lists_as_text(inner) for key, inner in value.items()}
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        return json.dumps(value).encode()
    return value


def lists_from_text(value: Any) -> Any:
    """Return a merged tree in which the texts of ``lists_as_text`` are lists again."""
    if isinstance(value, Mapping):
        return {str(key): lists_from_text(inner) for key, inner in value.items()}
    return json.loads(value) if isinstance(value, bytes) else value


def _file_error(path: Path, rule: str, remedy: str = "") -> ConfigError:
    return ConfigError.of(str(path), rule, remedy)
