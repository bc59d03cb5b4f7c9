"""The process behind the data plane: it owns the storage's processes and the registry.

Values never pass through it. Clients ask it where things are, over ``rpc``; opening and closing
partitions come from the driver as actor calls.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray

from nemo_like.config.schema import DataPlaneConfig
from nemo_like.data_plane.capacity import Capacity
from nemo_like.data_plane.columns import Column
from nemo_like.data_plane.errors import DeadlineExceeded, StorageFailed
from nemo_like.data_plane.registry import Registry
from nemo_like.data_plane.rpc import Handler, RpcServer
from nemo_like.data_plane.segments import (
    Commit,
    PartitionInfo,
    Replaced,
    Replacement,
    Rows,
    Segment,
    Thinned,
    Want,
)
from nemo_like.data_plane.transfer_queue import Connection, Session, Storage

# How often a process that reads a partition writes into it without asking for keys.
_WRITES_OF_READER = 2

_Found = tuple[PartitionInfo, list[int], list[Segment]]


class DataPlaneHost:
    """One asyncio actor per run."""

    def __init__(self, *, cfg: DataPlaneConfig, run_id: str, start_timeout_s: float) -> None:
        """``run_id`` must differ between the runs of one Ray cluster."""
        self._timeout_s = cfg.timeout_s
        self._start_timeout_s = start_timeout_s
        self._storage = Storage(cfg)
        limit_bytes = None if cfg.capacity_gib is None else int(cfg.capacity_gib * 2**30)
        self._registry = Registry(run_id, Capacity(limit_bytes), cfg.max_open_partitions)
        self._changed = _Changes()
        self._failed: asyncio.Future[str] = asyncio.Future()
        self._spare = _SpareIndexes(self._failed)
        self._starting: asyncio.Task[Connection] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._server: RpcServer | None = None
        self._session: Session | None = None
        self._num_clients = 0

    async def ready(self) -> None:
        """Returns once the storage is up. Raises StorageFailed when the cluster can't place it in time."""
        await self._started()

    async def connect(self) -> Connection:
        """A connection for one more process."""
        connection = await self._started()
        self._num_clients += 1
        return replace(connection, client_id=str(self._num_clients))

    async def storage_failure(self) -> str:
        """Never returns while the storage is well; then says which of its processes died."""
        return await asyncio.shield(self._failed)

    async def open_partition(
        self, name: str, columns: Sequence[Column], num_readers: int | None = None
    ) -> None:
        """Register a partition and its columns before anyone writes. Waits while too many are open, and
        raises TooManyPartitions at the deadline."""
        if not self._registry.open(name, columns, num_readers):
            try:
                async with asyncio.timeout(self._timeout_s):
                    while not self._registry.open(name, columns, num_readers):
                        await self._changed.next()
            except TimeoutError:
                raise self._registry.too_many(name, self._timeout_s) from None
        if self._session is not None:
            self._spare.register(self._session, self._registry.describe(name), self._timeout_s)

    async def close_partition(self, name: str) -> None:
        """Drop a partition and everything in it; safe when it is already gone."""
        storage_id = self._registry.close(name)
        self._changed.notify()
        if storage_id is not None and self._session is not None:
            await self._spare.forget(storage_id)
            await self._finish(self._session.drop_partition(storage_id), f"closing partition {name!r}")
            self._registry.capacity.release_partition(storage_id)

    async def describe(self, name: str) -> tuple[PartitionInfo, list[int]]:
        """Indexes under which the asking process may store come with it."""
        info = self._registry.describe(name)
        await self._spare.settled(info.storage_id)
        return info, self._spare.take(info.storage_id, info.num_readers or 0)

    def reserve(self, name: str, storage_id: str, sizes: Mapping[str, int]) -> None:
        """Room for keys that are about to be stored. Raises CapacityExceeded."""
        self._registry.reserve(name, storage_id, sizes)

    def release(self, storage_id: str, keys: Sequence[str]) -> None:
        """Give reserved room back."""
        self._registry.capacity.release(storage_id, keys)

    def commit(self, name: str, storage_id: str, commit: Commit) -> None:
        self._registry.commit(name, storage_id, commit)
        self._changed.notify()

    def find(
        self, name: str, wants: Sequence[Want], timeout_s: float
    ) -> _Found | Coroutine[Any, Any, _Found]:
        """``describe`` and ``locate`` in one, for who comes to a partition for the first time."""
        info = self._registry.describe(name)
        found = self._registry.locate(name, info.storage_id, wants)
        if found is None:
            return self._find_written(info, wants, timeout_s)
        return info, self._spare.take(info.storage_id, _WRITES_OF_READER), found

    def locate(
        self, name: str, storage_id: str, wants: Sequence[Want], timeout_s: float
    ) -> list[Segment] | Coroutine[Any, Any, list[Segment]]:
        """Waits until everything wanted is written. Raises MissingData when the time is over."""
        found = self._registry.locate(name, storage_id, wants)
        return found if found is not None else self._written(name, storage_id, wants, timeout_s)

    async def _find_written(self, info: PartitionInfo, wants: Sequence[Want], timeout_s: float) -> _Found:
        found = await self._written(info.name, info.storage_id, wants, timeout_s)
        return info, self._spare.take(info.storage_id, _WRITES_OF_READER), found

    async def _written(
        self, name: str, storage_id: str, wants: Sequence[Want], timeout_s: float
    ) -> list[Segment]:
        try:
            async with asyncio.timeout(timeout_s):
                while (found := self._registry.locate(name, storage_id, wants)) is None:
                    await self._changed.next()
                return found
        except TimeoutError:
            raise self._registry.missing(name, storage_id, wants, timeout_s) from None

    async def clear(self, name: str, storage_id: str, rows: Rows) -> Sequence[Thinned]:
        """Drop rows and free the segments that nothing needs any more; those of which some parts are
        needed, for ``replace``."""
        return await self._freed(name, storage_id, self._registry.clear(name, storage_id, rows))

    async def replace(
        self, name: str, storage_id: str, replacements: Sequence[Replacement]
    ) -> Sequence[Thinned]:
        """Put segments in the place of others and free those; as ``clear``."""
        return await self._freed(name, storage_id, self._registry.replace(name, storage_id, replacements))

    async def _freed(self, name: str, storage_id: str, replaced: Replaced) -> Sequence[Thinned]:
        if replaced.obsolete:
            assert self._session is not None
            work = self._session.drop(storage_id, replaced.obsolete)
            await self._finish(work, f"clearing samples of partition {name!r}")
            self._registry.capacity.release(storage_id, [segment.key for segment in replaced.obsolete])
        return replaced.thinned

    async def shutdown(self) -> None:
        """End the storage; everything in it is gone."""
        if self._watch is not None:
            self._watch.cancel()
        if self._session is not None:
            await asyncio.to_thread(self._session.close)
        if self._server is not None:
            self._server.close()
        self._storage.stop()

    async def _started(self) -> Connection:
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        return await asyncio.shield(self._starting)

    async def _start(self) -> Connection:
        addresses = await self._storage.start(self._start_timeout_s)
        self._watch = asyncio.create_task(self._watch_storage())
        calls: dict[str, Handler] = {
            "describe": self.describe,
            "reserve": self.reserve,
            "release": self.release,
            "commit": self.commit,
            "find": self.find,
            "locate": self.locate,
            "clear": self.clear,
            "replace": self.replace,
        }
        self._server = RpcServer(ray.util.get_node_ip_address(), calls)
        connection = Connection("host", self._server.address, addresses)
        self._session = await asyncio.to_thread(Session, connection, concurrent.futures.Future())
        return connection

    async def _watch_storage(self) -> None:
        self._failed.set_result(await self._storage.death())

    async def _finish(self, work: Coroutine[Any, Any, None], doing: str) -> None:
        """Wait for the storage. It swallows errors while it clears, so ask for the dead afterwards too."""
        assert self._session is not None
        done = asyncio.ensure_future(asyncio.wrap_future(self._session.start(work)))
        await asyncio.wait([done, self._failed], timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if self._failed.done():
            done.cancel()
            raise StorageFailed(f"{self._failed.result()}, noticed while {doing}")
        if not done.done():
            done.cancel()
            raise DeadlineExceeded(f"the storage did not answer within {self._timeout_s:g} s while {doing}")
        done.result()


class _SpareIndexes:
    """Keys that TransferQueue's controller registers when a partition is opened. Who comes to the partition
    gets some, and stores under them without asking the controller. Used on one event loop."""

    def __init__(self, failed: asyncio.Future[str]) -> None:
        """Waits end when ``failed`` is done."""
        self._failed = failed
        self._registered: dict[str, asyncio.Future[list[int]]] = {}  # by storage id
        self._names = map("host.{}".format, itertools.count())

    def register(self, session: Session, info: PartitionInfo, timeout_s: float) -> None:
        """Where it is known who shares the partition: a segment of the first put for each of its readers,
        and what each of them then writes. Returns at once."""
        count = (info.num_readers or 0) * (1 + _WRITES_OF_READER)
        if count:
            keys = list(itertools.islice(self._names, count))
            work = session.start(asyncio.to_thread(session.register, info.storage_id, keys, timeout_s))
            self._registered[info.storage_id] = asyncio.wrap_future(work)

    async def settled(self, storage_id: str) -> None:
        """Returns when the controller has answered, or the storage has failed."""
        registered = self._registered.get(storage_id)
        if registered is not None and not registered.done():
            waits: list[asyncio.Future[Any]] = [registered, self._failed]
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)

    def take(self, storage_id: str, count: int) -> list[int]:
        """At most so many; none while the controller has not answered."""
        registered = self._registered.get(storage_id)
        # Without spare keys a writer registers its own, and meets the error that was met here.
        if registered is None or not registered.done() or registered.exception() is not None:
            return []
        free = registered.result()
        taken, free[:count] = free[:count], []
        return taken

    async def forget(self, storage_id: str) -> None:
        """Of a partition that is closed: nothing is registered for it afterwards."""
        await self.settled(storage_id)
        self._registered.pop(storage_id, None)


class _Changes:
    """Wakes whoever waits for the next change of the registry; used on one event loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def next(self) -> None:
        await self._event.wait()
