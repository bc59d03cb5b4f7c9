"""Loads a user's own functions and classes by import path, and says where their modules are looked for."""

from __future__ import annotations

import importlib
import os
import sys
from itertools import chain
from pathlib import Path
from typing import Any


def also_search(folder: Path) -> None:
    """Let this process, and processes that it starts from now on, find the modules in ``folder``, after all
    other places. A folder without modules changes nothing.
    """
    if not any(chain(folder.glob("*.py"), folder.glob("*/__init__.py"))):
        return
    added = str(folder.absolute())
    if added not in sys.path:
        sys.path.append(added)
    places = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place]
    if added not in places:
        os.environ["PYTHONPATH"] = os.pathsep.join([*places, added])


def load_by_path(path: str) -> Any:
    """Import the module and return the object that "package.module:name" names.

    Raises ValueError, which says which part of the path does not exist. Errors that the module itself raises
    while it is imported are raised unchanged.
    """
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise ValueError(f"{path!r} is no import path; write package.module:name")
    if module_name.endswith(".py"):
        raise ValueError(
            f"{path!r} names a file; write the module, {module_name[:-3].rpartition('/')[2]}:{name}"
        )
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(
            f"{path!r}: there is no module {error.name!r}; is it installed, beside the configuration, or on "
            "PYTHONPATH?"
        ) from None
    if not hasattr(module, name):
        raise ValueError(f"{path!r}: module {module_name!r} has no {name!r}")
    return getattr(module, name)
