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
from nemo_like.data_plane.storage_errors import DeadlineExceeded

# How much later than the host's own deadline a caller gives up, so that the host's better message wins.
_GRACE_S = 5.0


class LocalHost:
    """``client.Host`` in this process, on an event loop that all of them share."""

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

        self._host = asyncio.run_coroutine_threadsafe(host(), _loop()).result(timeout_s + _GRACE_S)

    def ask(self, method: str, partition: str, timeout_s: float, *args: Any) -> Any:
        answer = asyncio.run_coroutine_threadsafe(getattr(self._host, method)(*args), _loop())
        try:
            return answer.result(timeout_s + _GRACE_S)
        except TimeoutError:
            answer.cancel()
            raise DeadlineExceeded(
                f"partition {partition!r}: {method} did not end within {timeout_s:.1f} s"
            ) from None


class InMemoryDataPlane(DataPlaneClient):
    """``DataPlane`` and ``DataPlaneControl`` in one; several clients may share one host."""

    def __init__(self, host: LocalHost | None = None, *, timeout_s: float = 5.0) -> None:
        self.host = host or LocalHost(timeout_s=timeout_s)
        client_id = next(self.host.client_ids)
        writer = f"client {client_id} of process {os.getpid()}"
        store = HostStore(self.host)
        super().__init__(self.host, store, client_id=client_id, writer=writer, timeout_s=timeout_s)

    def open_partition(self, name: str, columns: Sequence[Column], num_readers: int | None = None) -> None:
        """Register a partition and its columns before anyone writes. Waits while as many partitions as
        there may be are open; raises TooManyPartitions at the deadline."""
        self.host.ask("open_partition", name, self._timeout_s, name, tuple(columns), num_readers)

    def close_partition(self, name: str) -> None:
        """Drop a partition and everything in it; safe when it is already gone."""
        self.host.ask("close_partition", name, self._timeout_s, name)


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of the process's hosts, on a thread of its own."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="data-plane-host", daemon=True).start()
    return loop
