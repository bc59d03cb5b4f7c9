"""Faster imports of large libraries, which take most of the time of an actor's start."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from nemo_like.config.import_path import load_by_path


@contextmanager
def lasting_imports(without: Sequence[str] = ()) -> Iterator[None]:
    """Keep the garbage collector away from what a block makes that does nothing but import.

    Imported objects stay for good. Looking for garbage among them takes a fifth of the import's time, and as
    long again at every later collection of all generations; vLLM makes six of those while it starts.
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


def load_target(path: str) -> Any:
    """Import and return the object "package.module:name". Raises ValueError as ``load_by_path`` does."""
    with lasting_imports():
        return load_by_path(path)
