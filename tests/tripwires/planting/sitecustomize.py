"""Plants the mutation that the environment variable NEMO_LIKE_MUTATION names, in this process.

Python imports this module at the start of every process that has this folder on PYTHONPATH. The module of the
mutation's target is not imported here: the target is replaced right after its module was executed, before
any other module can take a name from it. With NEMO_LIKE_MUTATION_LOG, a line in that file says that it was
replaced in this process.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_HERE = Path(__file__).resolve().parent


class Planter:
    """Finds the module of one mutation's target, and replaces the target when that module is executed."""

    def __init__(self, mutations: ModuleType, name: str) -> None:
        self._mutations, self._mutation = mutations, mutations.MUTATIONS[name]
        self._module, self._path = self._mutation.target.split(":")

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the spec of the target's module as the other finders give it, and None for other modules."""
        if name != self._module:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((one for one in specs if one is not None), None)
        if spec is not None and spec.loader is not None:
            self._plant_after_execution(spec.loader)
        return spec

    def _plant_after_execution(self, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self.plant(module)

        loader.exec_module = exec_module

    def plant(self, module: ModuleType) -> None:
        """Replace the target in its module or class."""
        *owners, name = self._path.split(".")
        owner: Any = module
        for one in owners:
            owner = getattr(owner, one)
        setattr(owner, name, self._mutations.planted(self._mutation, vars(owner)[name]))
        if log := os.environ.get("NEMO_LIKE_MUTATION_LOG"):
            with open(log, "a", encoding="utf-8") as file:
                file.write(f"{os.getpid()} {self._mutation.name} {' '.join(sys.argv)[:80]}\n")


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def _load_shadowed() -> None:
    """Execute the machine's own ``sitecustomize``, if there is one, which this module shadows."""
    elsewhere = [place for place in sys.path if Path(place or ".").resolve() != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", elsewhere)
    if spec is not None and spec.origin is not None:
        _load("shadowed_sitecustomize", Path(spec.origin))


if wanted := os.environ.get("NEMO_LIKE_MUTATION"):
    sys.meta_path.insert(0, Planter(_load("nemo_like_mutations", _HERE.parent / "mutations.py"), wanted))
_load_shadowed()
