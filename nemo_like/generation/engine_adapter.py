"""The LoRA adapters that an engine computes beside its weights."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineAdapter:
    """What an engine must know at its start of the adapters that weight transfers will bring."""

    rank: int
    target_modules: tuple[str, ...]  # last parts of the layers' names; (): every layer that vLLM can adapt
