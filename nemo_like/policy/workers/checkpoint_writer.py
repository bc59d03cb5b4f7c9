"""Writes a checkpoint of the workers' state, at once or in the background.

    rank:  state ─▶ copy in host memory ─▶ thread: plan with the other ranks, write files, hash them
           trains on                        (a process group of its own)

In blocking mode no copy is made, and the rank waits until its files are written and hashed.
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
from nemo_like.checkpoint.options import CheckpointWriting

_PLAIN_COPY = StagingOptions(
    use_pinned_memory=False, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=False
)


class CheckpointWriter:
    """Writes one rank's part of one checkpoint. Every rank of the layout makes a writer, calls ``write`` with
    its state, and then ``complete``.

    ``group`` spans all ranks; nothing else may use it while the checkpoint is being written.
    """

    def __init__(self, group: dist.ProcessGroup, writing: CheckpointWriting) -> None:
        self._group = group
        self._is_in_background = writing is CheckpointWriting.background
        self._save: Callable[[], None] = lambda: None
        self._digests: Future[dict[str, str]] = Future()

    def copied(self, value: Tensor) -> Tensor:
        """Return a tensor that ``write`` can read: in the background a copy on the host, since the next step
        changes the original; else the tensor itself."""
        return value.detach().to("cpu", copy=True) if self._is_in_background else value

    def staged(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a whole state that ``write`` can read, copied as by ``copied``; it may hold DTensors."""
        return self.copy_of(state) if self._is_in_background else state

    def copy_of(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a copy on the host of a state that ``write`` can read; it may hold DTensors."""
        return DefaultStager(_PLAIN_COPY).stage(state)

    def write(self, state: dict[str, Any], path: Path, planner: SavePlanner | None = None) -> None:
        """Write ``state``, made of results of ``copied`` or ``staged``: now, or in the background once
        ``complete`` is called.

        Raises RuntimeError when writing now fails; ``wait`` raises a failure in the background.
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
            with shortened_errors():
                save()

    def complete(self, path: Path) -> None:
        """Hash this rank's share of the files in ``path``: now, or in the background once they are written.

        The rank calls this after it has put everything else into the directory.
        """

        def run() -> None:
            try:
                with shortened_errors():
                    try:
                        self._save()
                    finally:
                        # The closure holds the copied state and this writer, which holds the closure.
                        self._save = lambda: None
                    ranks = dist.get_rank(self._group), dist.get_world_size(self._group)
                    self._digests.set_result(share_digests(path, *ranks))
            except RuntimeError as error:
                self._digests.set_exception(error)

        if self._is_in_background:
            # A daemon thread: a worker that is told to end does not stay to finish writing.
            threading.Thread(target=run, name="checkpoint", daemon=True).start()
        else:
            run()

    def is_done(self) -> bool:
        """Return whether this rank's part is on disk and hashed; raise the error of a failed write."""
        return self._digests.done() and self._digests.result() is not None

    def wait(self, timeout_s: float) -> dict[str, str]:
        """Wait until this rank's part is on disk; return the SHA-256 of its share of the files, by name.

        Raises the error of a failed write, and TimeoutError after ``timeout_s``.
        """
        return self._digests.result(timeout_s)


@contextmanager
def shortened_errors() -> Iterator[None]:
    """Turn any error of the block into a RuntimeError of one line, which names each rank that failed where
    the error lists ranks."""
    try:
        yield
    except CheckpointException as error:
        by_rank = (f"rank {rank}: {_first_line(cause[0])}" for rank, cause in error.failures.items())
        raise RuntimeError("; ".join(by_rank)) from error
    except Exception as error:
        raise RuntimeError(_first_line(error)) from error


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
