"""An engine that counts how often vLLM preempted a request."""

from __future__ import annotations

from typing import Any

from nemo_like.generation.vllm_engine import VllmEngine


class PreemptingEngine(VllmEngine):
    """To be hosted in the place of ``VllmEngine``."""

    _num_preemptions = 0

    def num_preemptions(self) -> int:
        return self._num_preemptions

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._thread.call(self._watch)

    def _watch(self) -> None:
        scheduler: Any = self._vllm.llm.engine_core.engine_core.scheduler
        preempt = scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> None:
            self._num_preemptions += 1
            preempt(*args, **kwargs)

        scheduler._preempt_request = counted
