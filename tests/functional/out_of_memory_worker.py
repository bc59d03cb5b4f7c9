"""A policy worker that finds no memory to train, once the file is there that ``OUT_OF_MEMORY_FLAG`` names."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from nemo_like.batch.meta import KVBatchMeta
from nemo_like.policy.groups.results import WorkerUpdate
from nemo_like.policy.workers.worker import PolicyWorker


class RaisingWorker(PolicyWorker):
    """To be hosted in the place of ``PolicyWorker``."""

    def train(self, meta: KVBatchMeta) -> WorkerUpdate | None:
        flag = Path(os.environ["OUT_OF_MEMORY_FLAG"])
        if flag.exists():
            flag.unlink()
            # The backend itself stays: a checkpoint may still be written from it.
            self._backend.train = _raise  # type: ignore[method-assign]
        return super().train(meta)


def _raise(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB.")
