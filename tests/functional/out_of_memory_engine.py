"""An engine whose next step finds no memory, once the file is there that ``OUT_OF_MEMORY_FLAG`` names."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from nemo_like.generation.vllm_engine import VllmEngine


class RaisingEngine(VllmEngine):
    """To be hosted in the place of ``VllmEngine``."""

    def _step(self) -> None:
        flag = Path(os.environ["OUT_OF_MEMORY_FLAG"])
        if flag.exists():
            flag.unlink()
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nThe rest follows.")
        super()._step()
