"""Faster imports of large libraries, which take most of the time of an actor's start."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

from nemo_like.config.import_path import load_by_path


@contextmanager
def lasting_imports(without: Collection[str] = ()) -> Iterator[None]:
    """Keep the garbage collector away from the objects that a block of imports makes.

    Imported objects stay for good. Looking for garbage among them takes a fifth of the import's time, and as
    long again at every later collection of all generations; vLLM runs six such collections while it starts.
    ``without`` names optional packages that must not be loaded in this block: importing them fails.
    """
    absent = [name for name in without if name not in sys.modules]
    sys.modules.update(dict.fromkeys(absent))  # type: ignore[arg-type]  # None: an import raises ImportError
    num_loaded = len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        if len(sys.modules) > num_loaded:
            gc.freeze()
        gc.enable()
        for name in absent:
            del sys.modules[name]


@contextmanager
def unmarked_for_compiler() -> Iterator[None]:
    """Keep a block of imports from loading torch's compiler.

    Libraries mark functions for the compiler by decorators, which load it when the library is imported; that
    takes 0.6 seconds. In this block the decorators return the function as it is. Use it for libraries whose
    functions nobody compiles.
    """
    compiler = importlib.import_module("torch.compiler")
    marks = {name: getattr(compiler, name) for name in ("allow_in_graph", "assume_constant_result")}
    for name in marks:
        setattr(compiler, name, _unmarked)
    try:
        yield
    finally:
        for name, mark in marks.items():
            setattr(compiler, name, mark)


def _unmarked(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def load_target(path: str, without: Collection[str] = ()) -> Any:
    """Import and return the object "package.module:name"; ``without`` is as for ``lasting_imports``.

    Raises ValueError as ``load_by_path`` does.
    """
    with lasting_imports(without):
        return load_by_path(path)
