"""The adapters that an engine computes beside its weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineAdapter:
    """What an engine must know of the adapters that it will compute beside its weights."""

    rank: int
    target_modules: tuple[str, ...]  # last parts of the layers' names; none: all that vLLM can adapt
