"""A data plane within one process: the same host and client without Ray, for tests and Ray-free workers."""

from __future__ import annotations

import asyncio
import itertools
import os
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

from nemo_like.batch.columns import Column
from nemo_like.data_plane.capacity import Capacity
from nemo_like.data_plane.catalog import Catalog
from nemo_like.data_plane.client import DataPlaneClient
from nemo_like.data_plane.host import DataPlaneHost
from nemo_like.data_plane.memory_storage import HostStore, InMemoryStorage
from nemo_like.data_plane.storage_errors import HOST_GRACE_S, DeadlineExceeded


class LocalHost:
    """A ``client.Host`` whose host is in this process; all hosts of a process share an event loop."""

    def __init__(
        self,
        *,
        capacity_bytes: int | None = None,
        max_open_partitions: int | None = None,
        timeout_s: float = 5.0,
    ) -> None:
        self.storage = InMemoryStorage()
        self.client_ids = map(str, itertools.count(1))
        catalog = Catalog("in-memory", Capacity(capacity_bytes), max_open_partitions)

        async def host() -> DataPlaneHost:
            return DataPlaneHost(self.storage, catalog, timeout_s=timeout_s, start_timeout_s=timeout_s)

        self._host = asyncio.run_coroutine_threadsafe(host(), _loop()).result(timeout_s + HOST_GRACE_S)

    def ask(self, method: str, partition: str, timeout_s: float, *args: Any) -> Any:
        answer = asyncio.run_coroutine_threadsafe(getattr(self._host, method)(*args), _loop())
        try:
            return answer.result(timeout_s + HOST_GRACE_S)
        except TimeoutError:
            answer.cancel()
            raise DeadlineExceeded(
                f"partition {partition!r}: {method} did not end within {timeout_s:.1f} s"
            ) from None


class InMemoryDataPlane(DataPlaneClient):
    """A ``DataPlane`` without Ray that opens and closes partitions too; several may share one host."""

    def __init__(self, host: LocalHost | None = None, *, timeout_s: float = 5.0) -> None:
        self.host = host or LocalHost(timeout_s=timeout_s)
        client_id = next(self.host.client_ids)
        writer = f"client {client_id} of process {os.getpid()}"
        store = HostStore(self.host)
        super().__init__(self.host, store, client_id=client_id, writer=writer, timeout_s=timeout_s)

    def open_partition(self, name: str, columns: Sequence[Column], num_readers: int | None = None) -> None:
        """Open a partition and declare its columns, as ``DataPlaneHost.open_partition`` says.

        Waits while ``max_open_partitions`` are open, and raises TooManyPartitions at the deadline.
        """
        self.host.ask("open_partition", name, self._timeout_s, name, tuple(columns), num_readers)

    def close_partition(self, name: str) -> None:
        """Close a partition and free everything in it; safe when it is closed already."""
        self.host.ask("close_partition", name, self._timeout_s, name)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all hosts in this process, which runs on a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="data-plane-host", daemon=True).start()
    return loop
