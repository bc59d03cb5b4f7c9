"""Kinds that a configuration names: each is one module, which brings all that is known of it.

    KINDS = Kinds("nemo_like.environments.kinds", "environment", "nemo_like.environments.kind:Kind")

A shipped kind is a module of that package, of the kind's name, with an object ``KIND``; a user's own is named
by import path, "package.module:KIND". What describes a kind is light: it names what is heavy by import path.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Any

from nemo_like.config.import_path import load_by_path
from nemo_like.config.problems import Problem


@dataclass(frozen=True, slots=True)
class EarlierKeys:
    """Keys that a group had before kinds replaced them: their types by name, and what replaces them in a tree
    of the group's plain values, in place; it returns a sentence for each that says what to write now."""

    types: Mapping[str, Any]
    replace: Callable[[dict[str, Any]], list[str]]


@dataclass(frozen=True, slots=True)
class Kinds:
    """The kinds of one thing.

    ``package`` has the shipped ones, and ``what`` is the thing's name in messages. ``described_by`` is the
    import path of the class whose objects describe kinds; such an object has ``options``, the class of the
    kind's own keys. They stand in the group ``into`` beside the key that names the kind, or beside that key;
    unless ``has_keys``, there are none.

    Where ``of_function`` is the import path of what describes a function, given its path, a user's own may be
    a plain function too, which is not imported for that; what describes a kind is then called ``KIND``.
    ``earlier`` is the import path of an ``EarlierKeys``, of keys that kinds have replaced.
    """

    package: str
    what: str
    described_by: str
    into: str = ""
    has_keys: bool = True
    of_function: str = ""
    earlier: str = ""

    def names(self) -> tuple[str, ...]:
        """Return the names of the shipped kinds, in alphabetical order."""
        return _modules(self.package)

    def load(self, name: str) -> Any:
        """Return what describes a kind.

        Raises ValueError when the kind is neither shipped nor such an object of the user's. What the user's
        module raises while it is imported is raised unchanged.
        """
        if name in self.names():
            return importlib.import_module(f"{self.package}.{name}").KIND
        if ":" not in name:
            raise ValueError(self._rule())
        if self.of_function and not name.endswith(":KIND"):
            return load_by_path(self.of_function)(name)
        found = load_by_path(name)
        if not isinstance(found, load_by_path(self.described_by)):
            module, _, described = self.described_by.partition(":")
            raise ValueError(f"{name!r} is no {described} of {module}, but {type(found).__name__}")
        _own.setdefault(self.package, {})[name] = found
        return found

    def own(self) -> tuple[Any, ...]:
        """Return what describes the users' own kinds that this process has loaded."""
        return tuple(_own.get(self.package, {}).values())

    def is_own(self, name: str) -> bool:
        """Return whether a kind is a user's own."""
        return name not in self.names()

    def function(self, name: str) -> Any:
        """Import and return the function of a kind. Raises what ``load`` does, and ValueError where its path
        does not exist."""
        return load_by_path(self.load(name).function)

    def options_in(self, name: object) -> type | None:
        """Return the class of the keys of the kind ``name`` which stand beside the key that names it; None
        where they have a group of their own, or there is no such kind."""
        if self.into or not self.has_keys or not isinstance(name, str) or self.problem("", name) is not None:
            return None
        options: type = self.load(name).options
        return options

    def problem(self, key: str, name: str, where: str = "") -> Problem | None:
        """Return what is wrong with ``name`` as the value of a key; None when it names a kind."""
        try:
            self.load(name)
        except Exception as error:
            if ":" in name:
                told = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
                return Problem(key=f"{key}={name}", rule=f"cannot be loaded: {told}", remedy="", where=where)
            close = get_close_matches(name.lower(), self.names(), n=1, cutoff=0.7)
            remedy = f"did you mean {close[0]}?" if close else ""
            return Problem(key=f"{key}={name!r}", rule=self._rule(), remedy=remedy, where=where)
        return None

    def _rule(self) -> str:
        own = "package.module:function" if self.of_function else "package.module:KIND"
        return f"must be one of {', '.join(self.names())}, or your own {self.what}, {own}"


# By the package of the shipped kinds, and by the path of each.
_own: dict[str, dict[str, Any]] = {}


@cache
def _modules(package: str) -> tuple[str, ...]:
    found = importlib.import_module(package)
    return tuple(sorted(module.name for module in pkgutil.iter_modules(found.__path__)))
