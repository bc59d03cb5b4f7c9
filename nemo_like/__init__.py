"""Synchronous GRPO on Ray actors; ``GRPO`` starts a run from Python (docs/how_to/notebook.md)."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nemo_like.api.python_run import GRPO
    from nemo_like.api.run_result import RunResult

__all__ = ["GRPO", "RunResult"]

# Every process of a run imports this package, and none of them these: they are loaded at their first use.
_MODULES = {"GRPO": "nemo_like.api.python_run", "RunResult": "nemo_like.api.run_result"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
