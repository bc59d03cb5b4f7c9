"""A policy worker that finds no memory to train, once the file ``flag`` is there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from nemo_like.batch.meta import KVBatchMeta
from nemo_like.policy.groups.results import WorkerUpdate
from nemo_like.policy.workers.worker import PolicyWorker


class RaisingWorker(PolicyWorker):
    """To be hosted in the place of ``PolicyWorker``."""

    def __init__(self, *, flag: Path, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._flag = flag

    def train(self, meta: KVBatchMeta) -> WorkerUpdate | None:
        if self._flag.exists():
            self._flag.unlink()
            # The backend itself stays: a checkpoint may still be written from it.
            self._backend.train = _raise  # type: ignore[method-assign]
        return super().train(meta)


def _raise(*_: object) -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB.")
