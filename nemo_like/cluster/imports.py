"""Imports of large libraries: most of what an actor's start consists of."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from nemo_like.config.import_path import load_by_path


@contextmanager
def lasting_imports(without: Sequence[str] = ()) -> Iterator[None]:
    """For a block that does nothing but import: what it makes stays for good.

    To look for garbage among it takes a fifth of the time now, and as long again whenever all generations
    are collected later, as vLLM does six times while it starts. ``without`` names packages that the imported
    ones would load where they find them and work without.
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
    """Return the object behind "package.module:name", imported for good. Raises ValueError as
    ``load_by_path`` does."""
    with lasting_imports():
        return load_by_path(path)
