"""The data plane over TransferQueue, whose only importer this is.

``DataPlaneHost`` runs in one actor of the run. It owns a TransferQueue of its own (controller and
storage units as actors under no public name, so that two runs on one Ray cluster never meet) and
the registry. Every other process holds a ``TransferQueueDataPlane``: values go straight between it
and the storage units, the registry is one call away.

A key of TransferQueue is a segment, its value one contiguous numpy array per column. TransferQueue
leaves out what it can't find, so each answer is compared with what was asked for. It never notices
that one of its processes died, so the host watches them and every client watches the host: a call
that waits fails the moment one of them is gone.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import socket
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

# Read when TransferQueue is imported. Our own deadlines are shorter; a retry of a request that a live
# unit did not answer in this time would only repeat it.
os.environ.setdefault("TQ_SIMPLE_STORAGE_SEND_RECV_TIMEOUT", "600")
os.environ.setdefault("TQ_SIMPLE_STORAGE_MAX_ATTEMPTS", "1")
os.environ.setdefault("TQ_NUM_THREADS", "1")
os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")

from tensordict import NonTensorStack, TensorDict
from transfer_queue.client import AsyncTransferQueueClient
from transfer_queue.controller import TransferQueueController
from transfer_queue.metadata import BatchMeta
from transfer_queue.storage.simple_storage import SimpleStorageUnit

from nemo_like.cluster.actors import ActorHandle, Call
from nemo_like.data_plane.client import PackedDataPlane, Stored
from nemo_like.data_plane.columns import Column
from nemo_like.data_plane.errors import (
    CorruptData,
    DataPlaneError,
    DeadlineExceeded,
    StorageFailed,
)
from nemo_like.data_plane.factory import DataPlaneSpec
from nemo_like.data_plane.registry import Registry
from nemo_like.data_plane.segments import Commit, PartitionInfo, Segment, Want

# How much later than the host's own deadline a caller gives up, so that the host's better message wins.
_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class Connection:
    """What a process needs to reach this run's TransferQueue."""

    client_id: str  # unique within the run
    controller: Any  # TransferQueue's address record
    backend: str  # TransferQueue's name of the storage backend
    backend_config: Mapping[str, Any]


class DataPlaneHost:
    """Owner of the storage and of the registry; one asyncio actor per run."""

    def __init__(
        self, *, run_id: str, num_storage_units: int, timeout_s: float, start_timeout_s: float
    ) -> None:
        self._num_storage_units = num_storage_units
        self._timeout_s = timeout_s
        self._start_timeout_s = start_timeout_s
        self._registry = Registry(run_id)
        self._changed = asyncio.Condition()
        self._failed: asyncio.Future[str] = asyncio.Future()
        self._starting: asyncio.Task[None] | None = None
        self._watches: list[asyncio.Task[None]] = []
        self._actors: dict[str, Any] = {}
        self._connection: Connection | None = None
        self._session: _Session | None = None
        self._num_clients = 0

    async def ready(self) -> None:
        """Returns once the storage is up. Raises StorageFailed when the cluster can't place it in time."""
        if self._starting is None:
            self._starting = asyncio.create_task(self._start())
        await asyncio.shield(self._starting)

    async def connect(self) -> Connection:
        """A connection for one more process."""
        await self.ready()
        assert self._connection is not None
        self._num_clients += 1
        return Connection(
            str(self._num_clients),
            self._connection.controller,
            self._connection.backend,
            self._connection.backend_config,
        )

    async def storage_failure(self) -> str:
        """Never returns while the storage is well; then says which of its processes died."""
        return await asyncio.shield(self._failed)

    async def open_partition(self, name: str, columns: Sequence[Column]) -> None:
        """Register a partition and its columns before anyone writes."""
        self._registry.open(name, columns)

    async def close_partition(self, name: str) -> None:
        """Drop a partition and everything in it; safe when it is already gone."""
        storage_id = self._registry.close(name)
        await self._notify()
        if storage_id is not None and self._session is not None:
            await asyncio.wrap_future(self._session.start(self._session.drop_partition(storage_id)))
            self._check_alive(f"closing partition {name!r}")

    async def describe(self, name: str) -> PartitionInfo:
        return self._registry.describe(name)

    async def commit(self, name: str, storage_id: str, commit: Commit) -> None:
        self._registry.commit(name, storage_id, commit)
        await self._notify()

    async def locate(
        self, name: str, storage_id: str, wants: Sequence[Want], timeout_s: float
    ) -> list[Segment]:
        """Waits until everything wanted is written. Raises MissingData when the time is over."""
        found = self._registry.locate(name, storage_id, wants)
        if found is not None:
            return found
        try:
            async with asyncio.timeout(timeout_s), self._changed:
                while (found := self._registry.locate(name, storage_id, wants)) is None:
                    await self._changed.wait()
                return found
        except TimeoutError:
            raise self._registry.missing(name, storage_id, wants, timeout_s) from None

    async def clear(
        self, name: str, storage_id: str, rows: Sequence[tuple[str, tuple[int, ...] | None]]
    ) -> None:
        """Drop rows and free the segments that nothing needs any more."""
        freed = self._registry.clear(name, storage_id, rows)
        if freed:
            assert self._session is not None
            await asyncio.wrap_future(self._session.start(self._session.drop(storage_id, freed)))
            self._check_alive(f"clearing samples of partition {name!r}")

    async def shutdown(self) -> None:
        """End the storage; everything in it is gone."""
        for watch in self._watches:
            watch.cancel()
        if self._session is not None:
            await asyncio.to_thread(self._session.close)
        for actor in self._actors.values():
            ray.kill(actor)
        self._actors.clear()

    async def _start(self) -> None:
        options = {
            "num_cpus": 1,
            "runtime_env": {"env_vars": {"TQ_LOGGING_LEVEL": "ERROR", "TQ_NUM_THREADS": "1"}},
        }
        # Polling mode: otherwise the controller sleeps in its only request thread, for every client.
        self._actors = {
            "TransferQueue controller": TransferQueueController.options(**options).remote(polling_mode=True)
        }
        for unit in range(self._num_storage_units):
            config = {"total_storage_size": None, "num_data_storage_units": self._num_storage_units}
            self._actors[f"TransferQueue storage unit {unit}"] = SimpleStorageUnit.options(
                **options, scheduling_strategy="SPREAD"
            ).remote(config=config)
        controller, *units = await self._addresses()
        self._watches = [
            asyncio.create_task(self._watch(name, actor)) for name, actor in self._actors.items()
        ]
        self._connection = Connection(
            "host", controller, "SimpleStorage", {"zmq_info": {unit.id: unit for unit in units}}
        )
        self._session = await asyncio.to_thread(_Session, self._connection)

    async def _addresses(self) -> list[Any]:
        """TransferQueue's address records, controller first."""
        calls = [actor.get_zmq_server_info.remote() for actor in self._actors.values()]
        try:
            async with asyncio.timeout(self._start_timeout_s):
                return list(await asyncio.gather(*calls))
        except TimeoutError:
            total = ray.cluster_resources().get("CPU", 0.0)
            free = ray.available_resources().get("CPU", 0.0)
            raise StorageFailed(
                f"the data plane's storage did not start within {self._start_timeout_s:g} s. Its "
                f"controller and data_plane.num_storage_units={self._num_storage_units} units need "
                f"{len(self._actors)} CPUs; the cluster has {total:g}, {free:g} of them free. Raise "
                "cluster.num_cpus, or lower the number of units"
            ) from None
        except RayActorError as error:
            raise StorageFailed(
                f"a process of the data plane's storage died while starting: {error}"
            ) from error

    async def _watch(self, name: str, actor: Any) -> None:
        """A call that never returns fails when its actor dies, which is the only notice there is."""
        try:
            await actor.__ray_call__.remote(_wait_forever)
        except (RayActorError, RayTaskError) as error:
            if not self._failed.done():
                self._failed.set_result(f"{name} died ({type(error).__name__})")

    def _check_alive(self, doing: str) -> None:
        """TransferQueue swallows errors while clearing, so ask for the dead afterwards."""
        if self._failed.done():
            raise StorageFailed(f"{self._failed.result()} while {doing}")

    async def _notify(self) -> None:
        async with self._changed:
            self._changed.notify_all()


class TransferQueueDataPlane(PackedDataPlane):
    """The data plane of one process."""

    def __init__(self, spec: DataPlaneSpec) -> None:
        """Connects; raises StorageFailed when the storage can't be reached."""
        catalog = _HostCatalog(spec.host)
        connection: Connection = catalog.call("connect", timeout_s=spec.start_timeout_s)
        self._session = _Session(connection)
        writer = f"process {os.getpid()} on {socket.gethostname()}"
        store = _TransferQueueStore(self._session, spec.host.submit("storage_failure"))
        super().__init__(
            catalog, store, client_id=connection.client_id, writer=writer, timeout_s=spec.timeout_s
        )

    def close(self) -> None:
        """Disconnect this process; the storage lives on."""
        self._session.close()


class _HostCatalog:
    """The host's registry, by actor calls."""

    def __init__(self, host: ActorHandle) -> None:
        self._host = host

    def call(self, method: str, *args: Any, timeout_s: float) -> Any:
        try:
            return self._host.submit(method, *args).result(timeout_s + _GRACE_S)
        except GetTimeoutError as error:
            raise DeadlineExceeded(
                f"the data plane's host did not answer {method} in {timeout_s:g} s"
            ) from error
        except RayTaskError as error:
            if isinstance(error.cause, DataPlaneError):
                raise error.cause from None
            raise
        except RayActorError as error:
            raise StorageFailed(f"the data plane's host died, noticed in {method}") from error

    def describe(self, name: str, timeout_s: float) -> PartitionInfo:
        return self.call("describe", name, timeout_s=timeout_s)

    def commit(self, info: PartitionInfo, commit: Commit, timeout_s: float) -> None:
        self.call("commit", info.name, info.storage_id, commit, timeout_s=timeout_s)

    def locate(self, info: PartitionInfo, wants: Sequence[Want], timeout_s: float) -> list[Segment]:
        return self.call("locate", info.name, info.storage_id, wants, timeout_s, timeout_s=timeout_s)

    def clear(
        self, info: PartitionInfo, rows: Sequence[tuple[str, tuple[int, ...] | None]], timeout_s: float
    ) -> None:
        self.call("clear", info.name, info.storage_id, rows, timeout_s=timeout_s)


class _TransferQueueStore:
    """Bytes in TransferQueue; a wait ends with the answer, the deadline, or the death of the storage."""

    def __init__(self, session: _Session, failure: Call) -> None:
        self._session = session
        self._failure: concurrent.futures.Future[str] = failure.ref.future()

    def save(self, info: PartitionInfo, keys: Sequence[str], values: Stored, timeout_s: float) -> None:
        self._finish(self._session.save(info.storage_id, keys, values), "put", info, timeout_s)

    def load(
        self, info: PartitionInfo, keys: Sequence[str], columns: Sequence[str], timeout_s: float
    ) -> Stored:
        return self._finish(self._session.load(info.storage_id, keys, columns), "get", info, timeout_s)

    def discard(self, info: PartitionInfo, keys: Sequence[str], timeout_s: float) -> None:
        self._finish(self._session.drop(info.storage_id, keys), "discard", info, timeout_s)

    def _finish(
        self, work: Coroutine[Any, Any, Any], doing: str, info: PartitionInfo, timeout_s: float
    ) -> Any:
        future = self._session.start(work)
        concurrent.futures.wait(
            [future, self._failure], timeout=timeout_s, return_when=concurrent.futures.FIRST_COMPLETED
        )
        if future.done():
            return self._result(future, doing, info)
        future.cancel()
        if self._failure.done():
            raise StorageFailed(f"partition {info.name!r}: {self._cause()} during {doing}")
        raise DeadlineExceeded(
            f"partition {info.name!r}: a {doing} did not finish within data_plane.timeout_s, of which "
            f"{timeout_s:.1f} s were left for it. The storage's processes live; raise the deadline if the "
            "data is that large"
        )

    def _result(self, future: concurrent.futures.Future[Any], doing: str, info: PartitionInfo) -> Any:
        try:
            return future.result()
        except DataPlaneError as error:
            raise type(error)(f"partition {info.name!r}: {error}") from None
        except Exception as error:
            cause = self._cause() if self._failure.done() else f"{type(error).__name__}: {error}"
            raise StorageFailed(f"partition {info.name!r}: {doing} failed: {cause}") from error

    def _cause(self) -> str:
        error = self._failure.exception()
        return (
            self._failure.result()
            if error is None
            else f"the data plane's host died ({type(error).__name__})"
        )


class _Session:
    """One process's TransferQueue client and the event loop it lives on."""

    def __init__(self, connection: Connection) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="data-plane", daemon=True)
        self._thread.start()
        self._client = AsyncTransferQueueClient(
            f"client_{connection.client_id}_{os.getpid()}", connection.controller, zmq_io_threads=1
        )
        self._client.initialize_storage_manager(connection.backend, dict(connection.backend_config))

    def start(self, work: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        """Run a coroutine on the session's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def save(self, storage_id: str, keys: Sequence[str], values: Stored) -> None:
        meta = await self._client.async_kv_retrieve_meta(
            keys=list(keys), partition_id=storage_id, create=True
        )
        if meta.size != len(keys):
            raise CorruptData(f"TransferQueue registered {meta.size} of {len(keys)} keys")
        fields = {name: NonTensorStack(*arrays) for name, arrays in values.items()}
        # Straight to the storage manager: the client's own put also rewrites torch's thread count.
        await self._client.storage_manager.put_data(TensorDict(fields, batch_size=len(keys)), meta)

    async def load(self, storage_id: str, keys: Sequence[str], columns: Sequence[str]) -> Stored:
        meta = await self._retrieve(storage_id, keys)
        absent = set(columns) - set(meta.field_names)
        if meta.size != len(keys) or not meta.is_ready or absent:
            raise CorruptData(
                f"TransferQueue has {meta.size} of {len(keys)} segments, and not the columns "
                f"{sorted(absent)} of all; the registry has them"
            )
        data = await self._client.storage_manager.get_data(meta.select_fields(list(columns)))
        if set(data.keys()) != set(columns) or data.batch_size[0] != len(keys):
            raise CorruptData(
                f"TransferQueue returned columns {sorted(data.keys())} of {data.batch_size[0]} segments"
            )
        return {name: _arrays(data.get(name)) for name in columns}

    async def drop(self, storage_id: str, keys: Sequence[str]) -> None:
        meta = await self._retrieve(storage_id, keys)
        if meta.size:
            await self._client.async_clear_samples(meta)

    async def drop_partition(self, storage_id: str) -> None:
        if storage_id in await self._client.async_get_partition_list():
            await self._client.async_clear_partition(storage_id)

    def close(self) -> None:
        self._client.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_GRACE_S)

    async def _retrieve(self, storage_id: str, keys: Sequence[str]) -> BatchMeta:
        return await self._client.async_kv_retrieve_meta(
            keys=list(keys), partition_id=storage_id, create=False
        )


def _arrays(stack: Any) -> list[np.ndarray]:
    return [value if isinstance(value, np.ndarray) else np.asarray(value) for value in stack.tolist()]


def _wait_forever(_actor: object) -> None:
    threading.Event().wait()
