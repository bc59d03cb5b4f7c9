"""Kinds that a configuration names, such as a loss or an environment. One module describes one kind.

    KINDS = Kinds("nemo_like.environments.kinds", "environment", "nemo_like.environments.kind:Kind")

A shipped kind is the object ``KIND`` of the module of that name in the package; a user's own kind is named by
import path, "package.module:KIND". Such an object is cheap to import: it refers to heavy modules by path.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cache
from typing import Any

from nemo_like.config.import_path import load_by_path
from nemo_like.config.problems import Problem


@dataclass(frozen=True, slots=True)
class EarlierKeys:
    """Keys that a group had before kinds replaced them.

    ``types`` has their types by name. ``replace`` rewrites them in a tree of the group's plain values, in
    place, and returns for each a sentence that says what to write now.
    """

    types: Mapping[str, Any]
    replace: Callable[[dict[str, Any]], list[str]]


@dataclass(frozen=True, slots=True)
class Kinds:
    """All kinds of one thing, such as all losses.

    ``package`` has the shipped kinds, and ``what`` names the thing in messages. ``described_by`` is the
    import path of the class of the objects ``KIND``. The attribute ``options`` of such an object is the class
    of the kind's own keys. These keys stand in the group ``into``, beside the key that names the kind, or
    directly beside that key when ``into`` is empty; with ``has_keys`` false kinds have no keys.

    With ``of_function``, a user's own kind may also be a plain function: ``of_function`` is the import path
    of what makes a ``KIND`` from the function's path without importing the function. A user's object must
    then be called ``KIND``. ``earlier`` is the import path of the ``EarlierKeys`` that these kinds have
    replaced. ``otherwise_called`` maps names that the field has for a thing to what is written here instead.
    """

    package: str
    what: str
    described_by: str
    into: str = ""
    has_keys: bool = True
    of_function: str = ""
    earlier: str = ""
    otherwise_called: Mapping[str, str] = field(default_factory=dict, hash=False)

    def names(self) -> tuple[str, ...]:
        """Return the names of the shipped kinds, in alphabetical order."""
        return _modules(self.package)

    def load(self, name: str) -> Any:
        """Return the object ``KIND`` of the kind ``name``.

        Raises ValueError when ``name`` is no shipped kind and leads to no object of the right class. Errors
        of the user's module while it is imported are raised unchanged.
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
        """Return the objects ``KIND`` of users' own kinds that this process has loaded."""
        return tuple(_own.get(self.package, {}).values())

    def is_own(self, name: str) -> bool:
        """Return whether a kind is a user's own."""
        return name not in self.names()

    def function(self, name: str) -> Any:
        """Import and return the function of a kind. Raises ``load``'s errors, ValueError for a wrong path."""
        return load_by_path(self.load(name).function)

    def options_in(self, name: object) -> type | None:
        """Return the class of the keys that the kind ``name`` puts beside the key that names it.

        Returns None when its keys have a group of their own, when it has none, and when there is no such
        kind.
        """
        if self.into or not self.has_keys or not isinstance(name, str) or self.problem("", name) is not None:
            return None
        options: type = self.load(name).options
        return options

    def problem(self, key: str, name: str, where: str = "") -> Problem | None:
        """Return why ``name``, the value of ``key``, is not the name of a kind; None when it is one."""
        try:
            self.load(name)
        except Exception as error:
            if ":" in name:
                reason = error if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
                return Problem(
                    key=f"{key}={name}", rule=f"cannot be loaded: {reason}", remedy="", where=where
                )
            close = get_close_matches(name.lower(), self.names(), n=1, cutoff=0.7)
            remedy = self.meant(name) or (f"did you mean {close[0]}?" if close else "")
            return Problem(key=f"{key}={name!r}", rule=self._rule(), remedy=remedy, where=where)
        return None

    def meant(self, name: str) -> str:
        """Return what is written here for a name that the field has; empty for other names."""
        word = name.lower().replace("-", "_")
        return f"{name} is {self.otherwise_called[word]}" if word in self.otherwise_called else ""

    def _rule(self) -> str:
        own = "package.module:function" if self.of_function else "package.module:KIND"
        return f"must be one of {', '.join(self.names())}, or your own {self.what}, {own}"


# Users' own kinds, by the package of the shipped kinds and by import path.
_own: dict[str, dict[str, Any]] = {}


@cache
def _modules(package: str) -> tuple[str, ...]:
    found = importlib.import_module(package)
    return tuple(sorted(module.name for module in pkgutil.iter_modules(found.__path__)))
