"""An engine that stops sampling when a test asks for it."""

from __future__ import annotations

from nemo_like.generation.vllm_engine import VllmEngine


class HeldEngine(VllmEngine):
    """To be hosted in the place of ``VllmEngine``."""

    def hold(self, holds: bool) -> None:
        """Sample no further token, or go on. Calls are answered all the while."""

        def change() -> None:
            self._thread.work = None if holds else self._requests

        self._thread.call(change)
