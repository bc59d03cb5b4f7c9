"""The driver's side of the data plane: it opens and closes partitions, and never reads one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from nemo_like.batch.columns import Column
from nemo_like.cluster.actors import ActorHandle, Call
from nemo_like.cluster.cluster import Cluster
from nemo_like.data_plane.operations import Operation, OperationLog
from nemo_like.data_plane.storage_errors import HOST_GRACE_S


class PartitionControl:
    """Opens and closes partitions by calls of the host's actor; every partition has the same columns."""

    def __init__(
        self,
        cluster: Cluster,
        host: ActorHandle,
        *,
        columns: Sequence[Column],
        num_readers: int | None,
        timeout_s: float,
    ) -> None:
        """Declare ``columns`` in every partition that is opened. ``num_readers`` is as in
        ``DataPlaneHost.open_partition``, and ``timeout_s`` is the host's own deadline."""
        self._cluster, self._host = cluster, host
        self._columns, self._num_readers, self._timeout_s = tuple(columns), num_readers, timeout_s
        self._closing: list[Call] = []

    @contextmanager
    def partition(self, name: str) -> Iterator[str]:
        """Open a partition for the block, with all columns; close it on exit, also when the block raises."""
        self.open(name)
        try:
            yield name
        finally:
            self.close(name)

    def close(self, name: str) -> None:
        """Close a partition, without waiting until it is closed, so that this overlaps with the start of the
        next step. Opening the next partition waits for it."""
        self._closing.append(self._host.submit("close_partition", name))

    def move_to(self, host: ActorHandle) -> None:
        """Use another host from now on; forget the closings that the host before it had not finished."""
        self._host = host
        self._closing.clear()

    def take_operations(self) -> Sequence[Operation]:
        """Return the openings since the last call; only ``ObservedPartitionControl`` has any."""
        return ()

    def open(self, name: str) -> None:
        """Open a partition with all columns; wait until earlier closings have ended, and for room."""
        calls = [*self._closing, self._host.submit("open_partition", name, self._columns, self._num_readers)]
        self._closing.clear()
        # Only the host's death ends the wait. When another actor died, the next stage will tell: a wait that
        # is left now would leave the partition open.
        self._cluster.gather(
            calls,
            stage=f"opening partition {name!r}",
            timeout_s=self._timeout_s + HOST_GRACE_S,
            watching=[self._host],
        )


class ObservedPartitionControl(PartitionControl):
    """A ``PartitionControl`` that records each opening, with its wait for the closing before it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._log = OperationLog()

    def take_operations(self) -> Sequence[Operation]:
        return self._log.take()

    def open(self, name: str) -> None:
        with self._log.operation("open"):
            super().open(name)
