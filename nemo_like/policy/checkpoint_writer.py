"""Writes a checkpoint of the workers' state, at once or while they train on.

    rank:  state ─▶ copy in host memory ─▶ thread: plan with the other ranks, write files
           trains on                        (a process group of its own)

In blocking mode there is no copy, and nothing goes on until the files are there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from nemo_like.config.schema import CheckpointWriting

_PLAIN_COPY = StagingOptions(
    use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
)


class CheckpointWriter:
    """Of one checkpoint. Every rank of the layout makes one and writes with it, once.

    ``group`` spans all ranks and is used by nothing else that could run at the same time.
    """

    def __init__(self, group: dist.ProcessGroup, writing: CheckpointWriting) -> None:
        self._group = group
        self._is_in_background = writing is CheckpointWriting.background
        self._written: Future[None] = Future()

    def copied(self, value: Tensor) -> Tensor:
        """What to write of a tensor that the next step changes."""
        return value.detach().to("cpu", copy=True) if self._is_in_background else value

    def staged(self, state: dict[str, Any]) -> dict[str, Any]:
        """The same for a state of tensors, distributed ones among them."""
        return DefaultStager(_PLAIN_COPY).stage(state) if self._is_in_background else state

    def write(self, state: dict[str, Any], path: Path, planner: SavePlanner | None = None) -> None:
        """Write what ``copied`` or ``staged`` returned; returns when it is on disk, or at once."""

        def save() -> None:
            with torch.no_grad():
                torch_checkpoint.save(
                    state,
                    storage_writer=torch_checkpoint.FileSystemWriter(path),
                    planner=planner,
                    process_group=self._group,
                )

        if self._is_in_background:
            # A daemon: a worker that is told to end does not write on.
            threading.Thread(target=self._run, args=(save,), name="checkpoint", daemon=True).start()
        else:
            self._run(save)
            self._written.result()

    def is_done(self) -> bool:
        """Whether everything is on disk; raises what went wrong."""
        return self._written.done() and self._written.result() is None

    def wait(self, timeout_s: float) -> None:
        """Until everything is on disk; raises what went wrong, TimeoutError when it takes longer."""
        self._written.result(timeout_s)

    def _run(self, save: Callable[[], None]) -> None:
        try:
            save()
        except CheckpointException as error:
            by_rank = (f"rank {rank}: {_in_short(cause[0])}" for rank, cause in error.failures.items())
            self._written.set_exception(RuntimeError("; ".join(by_rank)))
        except Exception as error:
            self._written.set_exception(RuntimeError(_in_short(error)))
        else:
            self._written.set_result(None)


def _in_short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
