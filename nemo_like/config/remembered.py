"""Remembers what was computed from files, until one of these files changes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from nemo_like.config.resolvers import environment_reads

_Result = TypeVar("_Result")
# Of a file or folder: where it lies, when it was changed, and its size. None where there is nothing.
_State = tuple[int, int, int, int] | None

_looked_at: ContextVar[dict[Path, _State] | None] = ContextVar("nemo_like_looked_at", default=None)


@dataclass(slots=True)
class _Slot:
    looked_at: dict[Path, _State] = field(default_factory=dict)
    result: Any = None
    is_filled: bool = False


def remembered(key: Hashable, compute: Callable[[], _Result]) -> _Result:
    """Return the result of ``compute``, or of an earlier call with the same ``key``.

    An earlier result is returned only while all paths that its computation passed to ``noted`` are as they
    were. A result that depends on environment variables is not kept. Callers may not change the result.
    """
    slot = _slot(key)
    if slot.is_filled and all(_state(path) == state for path, state in slot.looked_at.items()):
        return slot.result
    slot.looked_at, slot.is_filled = {}, False
    token = _looked_at.set(slot.looked_at)
    try:
        with environment_reads() as names:
            slot.result = compute()
    finally:
        _looked_at.reset(token)
    slot.is_filled = not names
    return slot.result


def noted(path: Path) -> Path:
    """Return ``path``, and note that the computation under way depends on what is there."""
    if (looked_at := _looked_at.get()) is not None:
        looked_at.setdefault(path, _state(path))
    return path


@lru_cache(maxsize=256)
def _slot(key: Hashable) -> _Slot:
    return _Slot()


def _state(path: Path) -> _State:
    try:
        seen = path.stat()
    except OSError:
        return None
    return seen.st_dev, seen.st_ino, seen.st_mtime_ns, seen.st_size
