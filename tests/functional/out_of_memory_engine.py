"""An engine whose next step finds no memory, once the file ``flag`` is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm import RequestOutput

from nemo_like.generation.vllm_engine import VllmEngine


class RaisingEngine(VllmEngine):
    """To be hosted in the place of ``VllmEngine``."""

    def __init__(self, *, flag: Path, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._flag = flag
        self._thread.call(self._watch)

    def _watch(self) -> None:
        step = self._vllm.llm.step

        def raising() -> list[RequestOutput]:
            if self._flag.exists():
                self._flag.unlink()
                raise torch.OutOfMemoryError(
                    "CUDA out of memory. Tried to allocate 2.00 GiB.\nThe rest follows."
                )
            return step()

        self._vllm.llm.step = raising  # type: ignore[method-assign]
