"""Engines one after the other in one process, since most of an engine's start is the imports."""

from __future__ import annotations

from typing import Any

from nemo_like.generation.vllm_engine import VllmEngine


class RenewedEngine:
    """To be hosted in the place of ``VllmEngine``: it is the engine that was built last."""

    def __init__(self, **kwargs: Any) -> None:
        self.renew(kwargs)

    def renew(self, kwargs: dict[str, Any]) -> None:
        """Build another engine; the one before stays idle, and has only the process in common with it."""
        self._engine = VllmEngine(**kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
