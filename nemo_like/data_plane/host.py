"""The process behind the data plane: it owns the storage's processes and the catalogue.

Values do not pass through the host, unless it stores them itself (``data_plane.backend=in_memory``). Other
processes reach it by actor calls: the driver opens and closes partitions, and clients reserve room, commit
what they saved and ask which segment holds which values.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from nemo_like.batch.columns import Column
from nemo_like.config.import_path import load_by_path
from nemo_like.data_plane.capacity import Capacity
from nemo_like.data_plane.catalog import Catalog
from nemo_like.data_plane.memory_storage import InMemoryStorage
from nemo_like.data_plane.options import DataPlaneConfig
from nemo_like.data_plane.segments import Commit, PartitionInfo, Rows, Segment, Want, with_write
from nemo_like.data_plane.storage_errors import (
    CapacityExceeded,
    DataPlaneError,
    DeadlineExceeded,
    StorageFailed,
)
from nemo_like.data_plane.storage_kind import storage_kind_of

_T = TypeVar("_T")


class Storage(Protocol):
    """A storage as the host uses it; ``transfer_queue`` and ``memory_storage`` implement it."""

    async def start(self, timeout_s: float) -> Any:
        """Start the storage's processes, and return what a client's store needs to reach them."""

    async def death(self) -> str:
        """Wait until one of the storage's processes is gone, and return which one and why."""

    async def register(self, storage_id: str, keys: Sequence[str]) -> Any:
        """Make keys known to the storage, and return the description with which a client saves under them."""

    async def clear(self, segments: Sequence[Segment]) -> None:
        """Free all that is stored of these segments, also where a segment was saved in part."""

    async def clear_partition(self, storage_id: str) -> None:
        """Free everything that was saved in a partition."""

    async def stop(self) -> None:
        """Stop the storage's processes; all values are lost. Safe to call twice."""


def start_host(
    *, cfg: DataPlaneConfig, run_id: str, start_timeout_s: float, log_path: str | None
) -> DataPlaneHost:
    """Build the host of a run; ``run_id`` must differ between the runs of one Ray cluster.

    ``log_path`` is the host's own log. The storage's processes log into a folder beside it; where it is None,
    they log where Ray keeps logs.
    """
    storage: Storage = load_by_path(storage_kind_of(cfg.backend).storage)(cfg, log_path)
    limit_bytes = None if cfg.capacity_gib is None else int(cfg.capacity_gib * 2**30)
    catalog = Catalog(run_id, Capacity(limit_bytes), cfg.max_open_partitions)
    return DataPlaneHost(storage, catalog, timeout_s=cfg.timeout_s, start_timeout_s=start_timeout_s)


class DataPlaneHost:
    """The host of a run.

    All its methods run on one event loop: the asyncio actor's, or the one that ``in_memory`` starts.
    """

    def __init__(
        self, storage: Storage, catalog: Catalog, *, timeout_s: float, start_timeout_s: float
    ) -> None:
        self._storage, self._catalog = storage, catalog
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._changed = asyncio.Event()
        self._failed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._starting: asyncio.Task[Any] | None = None
        self._watch: asyncio.Task[None] | None = None
        self._freeing: dict[str, set[asyncio.Task[None]]] = {}  # by storage id
        self._unfinished: dict[str, list[Segment]] = {}  # reserved and not committed; by storage id
        self._num_clients = 0

    async def ready(self) -> None:
        """Wait until the storage is up. Raises StorageFailed when it does not start."""
        await self._started()

    async def connect(self) -> tuple[str, Any]:
        """Wait until the storage is up; return an id for one more client, and where the storage is."""
        address = await self._started()
        self._num_clients += 1
        return str(self._num_clients), address

    async def storage_failure(self) -> str:
        """Wait until one of the storage's processes dies, and return which one."""
        return await asyncio.shield(self._failed)

    async def open_partition(
        self, name: str, columns: Sequence[Column], num_readers: int | None = None
    ) -> None:
        """Open a partition and declare its columns, before anyone writes.

        ``num_readers`` is the number of ranks among which ``sharding`` will divide all samples of a put; the
        samples of one rank are then stored together. Pass None where that is unknown, as when some groups
        will be cleared before.

        Waits while ``max_open_partitions`` are open, and raises TooManyPartitions at the deadline.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                while not self._catalog.open(name, columns, num_readers):
                    await self._next_change()
        except TimeoutError:
            raise self._catalog.too_many(name, self._timeout_s) from None

    async def close_partition(self, name: str) -> None:
        """Close a partition and free everything in it; safe when it is closed already."""
        storage_id = self._catalog.close(name)
        self._notify()
        if storage_id is not None:
            await self._finish(self._empty(storage_id), f"closing partition {name!r}")
            self._catalog.capacity.release_partition(storage_id)

    async def describe(self, name: str) -> PartitionInfo:
        """Return the description of an open partition that clients need. Raises UnknownPartition."""
        return self._catalog.describe(name)

    async def reserve(
        self, name: str, storage_id: str, segments: Sequence[Segment], sizes: Sequence[int]
    ) -> Any:
        """Reserve room for segments that are about to be saved, and return the storage's description of their
        keys. ``sizes`` are the segments' bytes. Raises UnknownPartition or CapacityExceeded."""
        self._check_storage(f"a put into partition {name!r}")
        keys = [segment.key for segment in segments]
        await self._take_room(name, storage_id, dict(zip(keys, sizes, strict=True)))
        write = await self._finish(self._storage.register(storage_id, keys), f"a put into partition {name!r}")
        self._unfinished.setdefault(storage_id, []).extend(with_write(segments, write))
        return write

    async def commit(self, name: str, storage_id: str, commit: Commit) -> None:
        """Make segments that were saved readable, all or none, and wake the calls that wait for them.

        Raises UnknownPartition, UnknownColumn, UnknownSamples or DuplicateWrite.
        """
        self._catalog.commit(name, storage_id, commit)
        self._settle(storage_id, commit.segments)
        self._notify()

    async def discard(self, name: str, storage_id: str, segments: Sequence[Segment]) -> None:
        """Free segments that were reserved, and perhaps saved, and will not be committed."""
        self._settle(storage_id, segments)
        self._free(storage_id, segments)

    async def locate(
        self, name: str, storage_id: str | None, wants: Sequence[Want], timeout_s: float
    ) -> tuple[PartitionInfo, list[Segment]]:
        """Wait until everything wanted is written, and return the segments that hold it.

        Where ``storage_id`` is None, the partition is the one that is open under the name. Raises MissingData
        after ``timeout_s``, UnknownPartition, UnknownColumn or UnknownSamples at once, and StorageFailed when
        a process of the storage dies.
        """
        info = self._catalog.describe(name)
        storage_id = storage_id or info.storage_id
        try:
            async with asyncio.timeout(timeout_s):
                while (found := self._catalog.locate(name, storage_id, wants)) is None:
                    await self._next_change()
        except TimeoutError:
            raise self._catalog.missing(name, storage_id, wants, timeout_s) from None
        return info, found

    async def clear(self, name: str, storage_id: str, rows: Rows) -> None:
        """Clear rows. Segments that have no row left are freed in the background.

        Raises UnknownPartition, or UnknownSamples for rows that were never put or have been cleared.
        """
        self._check_storage(f"clearing samples of partition {name!r}")
        self._free(storage_id, self._catalog.clear(name, storage_id, rows))

    async def save(self, storage_id: str, keys: Sequence[str], values: Mapping[str, Sequence[Any]]) -> None:
        """Store values in this process; only ``data_plane.backend=in_memory`` does."""
        self._in_memory.save(storage_id, keys, values)

    async def load(self, storage_id: str, segments: Sequence[Segment]) -> list[dict[str, Any]]:
        """Return values that this process stores; only ``data_plane.backend=in_memory`` does."""
        return self._in_memory.load(storage_id, segments)

    async def settled(self) -> None:
        """Wait until everything that was cleared is freed, at most the host's ``timeout_s``."""
        if freeing := [task for tasks in self._freeing.values() for task in tasks]:
            await asyncio.wait(freeing, timeout=self._timeout_s)

    async def stop(self) -> None:
        """Stop the storage; all values are lost."""
        if self._watch is not None:
            self._watch.cancel()
        await self._storage.stop()

    @property
    def _in_memory(self) -> InMemoryStorage:
        assert isinstance(self._storage, InMemoryStorage)
        return self._storage

    async def _started(self) -> Any:
        if self._starting is None:
            self._starting = asyncio.create_task(self._storage.start(self._start_timeout_s))
            self._starting.add_done_callback(self._watch_storage)
        return await asyncio.shield(self._starting)

    def _watch_storage(self, starting: asyncio.Task[Any]) -> None:
        async def watch() -> None:
            self._failed.set_result(await self._storage.death())
            self._notify()

        if not starting.cancelled() and starting.exception() is None:
            self._watch = asyncio.create_task(watch())

    async def _take_room(self, name: str, storage_id: str, sizes: Mapping[str, int]) -> None:
        """Reserve bytes. Where they do not fit, wait until cleared segments are freed and try once more."""
        try:
            self._catalog.reserve(name, storage_id, sizes)
        except CapacityExceeded:
            await self.settled()
            self._catalog.reserve(name, storage_id, sizes)

    def _settle(self, storage_id: str, segments: Sequence[Segment]) -> None:
        """Remove these segments from the unfinished ones: they were committed, or are being freed."""
        keys = {segment.key for segment in segments}
        left = [one for one in self._unfinished.get(storage_id, ()) if one.key not in keys]
        self._unfinished[storage_id] = left

    def _free(self, storage_id: str, segments: Sequence[Segment]) -> None:
        """Free segments in the background; their bytes stay reserved until they are free."""

        async def free() -> None:
            await self._storage.clear(segments)
            self._catalog.capacity.release(storage_id, [segment.key for segment in segments])

        if segments:
            task = asyncio.create_task(free())
            self._freeing.setdefault(storage_id, set()).add(task)

    async def _empty(self, storage_id: str) -> None:
        """Free everything of a partition that was closed. Raises the error with which freeing a segment
        failed."""
        self._free(storage_id, self._unfinished.pop(storage_id, []))
        await asyncio.gather(*self._freeing.pop(storage_id, ()))
        await self._storage.clear_partition(storage_id)

    async def _finish(self, work: Coroutine[Any, Any, _T], doing: str) -> _T:
        """Wait until the storage has done ``work``, and return the result.

        Raises StorageFailed when one of its processes dies, even if ``work`` has ended: TransferQueue
        hides errors while it clears. Raises DeadlineExceeded after ``timeout_s``, and the work's own
        DataPlaneError.
        """
        done = asyncio.ensure_future(work)
        waits: list[asyncio.Future[Any]] = [done, self._failed]
        await asyncio.wait(waits, timeout=self._timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            done.cancel()
        self._check_storage(doing)
        if done.cancelled() or not done.done():
            raise DeadlineExceeded(
                f"the storage did not answer within {self._timeout_s:g} s in {doing}, though its processes "
                "live"
            )
        error = done.exception()
        if error is not None and not isinstance(error, DataPlaneError):
            raise StorageFailed(f"{doing} failed: {type(error).__name__}: {error}") from error
        return done.result()

    def _check_storage(self, doing: str) -> None:
        if self._failed.done():
            raise StorageFailed(f"{self._failed.result()}, noticed in {doing}")

    def _notify(self) -> None:
        """Wake the calls that wait for a change of the catalogue."""
        self._changed.set()
        self._changed = asyncio.Event()

    async def _next_change(self) -> None:
        self._check_storage("a wait for what others write")
        await self._changed.wait()
        self._check_storage("a wait for what others write")
