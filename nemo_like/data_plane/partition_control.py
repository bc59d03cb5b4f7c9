"""The driver's side of the data plane: it opens and closes partitions, and never reads one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from nemo_like.batch.columns import Column
from nemo_like.cluster.actors import ActorHandle, Call
from nemo_like.cluster.cluster import Cluster
from nemo_like.data_plane.operations import Operation, OperationLog

# How much later than the host's own deadline the driver gives up, so that the host's better message wins.
_GRACE_S = 5.0


class PartitionControl:
    """``DataPlaneControl`` over the process that owns the storage."""

    def __init__(
        self,
        cluster: Cluster,
        host: ActorHandle,
        *,
        columns: Sequence[Column],
        num_readers: int | None,
        timeout_s: float,
    ) -> None:
        """``columns`` are declared for every partition, before anyone writes; ``num_readers`` as in
        ``DataPlaneControl``."""
        self._cluster, self._host = cluster, host
        self._columns, self._num_readers, self._timeout_s = tuple(columns), num_readers, timeout_s
        self._closing: list[Call] = []

    @contextmanager
    def partition(self, name: str) -> Iterator[str]:
        """Open with every column declared; dropped on exit, also when the block raised.

        Exit does not wait for the closing, so that it overlaps with the next step's start; opening the
        next partition does.
        """
        self._open(name)
        try:
            yield name
        finally:
            self._closing.append(self._host.submit("close_partition", name))

    def move_to(self, host: ActorHandle) -> None:
        """Use another host from now on; what the one before held is gone."""
        self._host = host
        self._closing.clear()

    def take_operations(self) -> Sequence[Operation]:
        """What was opened since the last time; nothing where nobody observes it."""
        return ()

    def _open(self, name: str) -> None:
        calls = [*self._closing, self._host.submit("open_partition", name, self._columns, self._num_readers)]
        self._closing.clear()
        # Other deaths are the concern of what comes next: an opening that was left would stay open.
        self._cluster.gather(
            calls,
            stage=f"opening partition {name!r}",
            timeout_s=self._timeout_s + _GRACE_S,
            watching=[self._host],
        )


class ObservedPartitionControl(PartitionControl):
    """Notes each opening, with what it waited for the closing of the partition before."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._log = OperationLog()

    def take_operations(self) -> Sequence[Operation]:
        return self._log.take()

    def _open(self, name: str) -> None:
        with self._log.operation("open"):
            super()._open(name)
