"""Writes a checkpoint of the workers' state, at once or while they train on.

    rank:  state ─▶ copy in host memory ─▶ thread: plan with the other ranks, write files, hash them
           trains on                        (a process group of its own)

In blocking mode there is no copy, and nothing goes on until the files are there and hashed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_checkpoint
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.planner import SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from nemo_like.checkpoint.digests import share_digests
from nemo_like.config.schema import CheckpointWriting

_PLAIN_COPY = StagingOptions(
    use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
)


class CheckpointWriter:
    """Of one checkpoint. Every rank of the layout makes one, has its state written and then completes it.

    ``group`` spans all ranks and is used by nothing else that could run at the same time.
    """

    def __init__(self, group: dist.ProcessGroup, writing: CheckpointWriting) -> None:
        self._group = group
        self._is_in_background = writing is CheckpointWriting.background
        self._save: Callable[[], None] = lambda: None
        self._digests: Future[dict[str, str]] = Future()

    def copied(self, value: Tensor) -> Tensor:
        """What to write of a tensor that the next step changes."""
        return value.detach().to("cpu", copy=True) if self._is_in_background else value

    def staged(self, state: dict[str, Any]) -> dict[str, Any]:
        """The same for a state of tensors, distributed ones among them."""
        return DefaultStager(_PLAIN_COPY).stage(state) if self._is_in_background else state

    def write(self, state: dict[str, Any], path: Path, planner: SavePlanner | None = None) -> None:
        """Write what ``copied`` or ``staged`` returned: now, or in the background after ``complete``.

        Raises RuntimeError when the former goes wrong.
        """

        def save() -> None:
            with torch.no_grad():
                torch_checkpoint.save(
                    state,
                    storage_writer=torch_checkpoint.FileSystemWriter(path),
                    planner=planner,
                    process_group=self._group,
                )

        if self._is_in_background:
            self._save = save
        else:
            with told_in_short():
                save()

    def complete(self, path: Path) -> None:
        """Hash this rank's share of the files in ``path``, in the background after ``write``'s are there.

        Call it when the rank has put everything else into the directory.
        """

        def run() -> None:
            try:
                with told_in_short():
                    self._save()
                    ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
                    self._digests.set_result(share_digests(path, *ranks))
            except RuntimeError as error:
                self._digests.set_exception(error)

        if self._is_in_background:
            # A daemon: a worker that is told to end does not write on.
            threading.Thread(target=run, name="checkpoint", daemon=True).start()
        else:
            run()

    def is_done(self) -> bool:
        """Whether everything is on disk; raises what went wrong."""
        return self._digests.done() and self._digests.result() is not None

    def wait(self, timeout_s: float) -> dict[str, str]:
        """Wait until everything is on disk; the SHA-256 of this rank's share of the files, by name.

        Raises what went wrong, TimeoutError when it takes longer.
        """
        return self._digests.result(timeout_s)


@contextmanager
def told_in_short() -> Iterator[None]:
    """Raise RuntimeError with a line for what failed, on every rank that it failed on."""
    try:
        yield
    except CheckpointException as error:
        by_rank = (f"rank {rank}: {_in_short(cause[0])}" for rank, cause in error.failures.items())
        raise RuntimeError("; ".join(by_rank)) from error
    except Exception as error:
        raise RuntimeError(_in_short(error)) from error


def _in_short(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
