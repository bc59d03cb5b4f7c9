"""An engine that counts how often vLLM preempted a request."""

from __future__ import annotations

from typing import Any

from nemo_like.generation.vllm_engine import VllmEngine


class PreemptingEngine(VllmEngine):
    """To be hosted in the place of ``VllmEngine``."""

    _num_preemptions = 0

    def num_preemptions(self) -> int:
        return self._num_preemptions

    def _start_engine(self) -> None:
        super()._start_engine()
        scheduler: Any = self._engine.engine_core.engine_core.scheduler
        preempt = scheduler._preempt_request

        def counted(*args: Any, **kwargs: Any) -> None:
            self._num_preemptions += 1
            preempt(*args, **kwargs)

        scheduler._preempt_request = counted
