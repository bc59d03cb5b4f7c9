"""The driver's side of the data plane: it opens and closes partitions, and never reads one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from nemo_like.cluster.actors import ActorHandle
from nemo_like.cluster.cluster import Cluster
from nemo_like.cluster.errors import ClusterError
from nemo_like.data_plane.columns import Column


class PartitionControl:
    """``DataPlaneControl`` over the process that owns the storage."""

    def __init__(
        self, cluster: Cluster, host: ActorHandle, *, columns: Sequence[Column], timeout_s: float
    ) -> None:
        """``columns`` are declared for every partition, before anyone writes."""
        self._cluster, self._host = cluster, host
        self._columns, self._timeout_s = tuple(columns), timeout_s

    @contextmanager
    def partition(self, name: str) -> Iterator[str]:
        """Open with every column declared; cleared on exit, also when the block raised."""
        self._call("open_partition", name, self._columns)
        try:
            yield name
        except ClusterError:
            # Processes are gone and the run ends: the host, if it lives, is about to close everything.
            self._host.submit("close_partition", name)
            raise
        except BaseException:
            self._call("close_partition", name)
            raise
        self._call("close_partition", name)

    def _call(self, method: str, *args: object) -> None:
        self._cluster.gather([self._host.submit(method, *args)], stage=method, timeout_s=self._timeout_s)
