"""The storage on TransferQueue. Only this module, ``zmq_guard`` and ``mooncake_digests`` import its parts.

A run builds a TransferQueue of its own from its public classes. Controller and storage units are actors
without a public name, so two runs on one Ray cluster never meet, and neither can close the other's. The
values are in TransferQueue's own storage units or in Mooncake's. A key stands for a segment, and its value is
one contiguous numpy array per column.

TransferQueue leaves values that it can't find out of its answers, and does not notice that one of its
processes died. So this module compares the answers with what was asked for, the host watches the processes,
and every client watches the host: a call that waits fails when one of them dies.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import os
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray.exceptions import RayActorError, RayTaskError
from tensordict import NonTensorStack, TensorDict
from transfer_queue.client import AsyncTransferQueueClient
from transfer_queue.metadata import BatchMeta

from nemo_like.cluster.actors import log_to, runtime_env
from nemo_like.compat.zmq_guard import Secret, SimpleStorageUnit, TransferQueueController, guard, guarding
from nemo_like.data_plane.client import Loaded, Stored
from nemo_like.data_plane.mooncake import Master, MooncakeStorageUnit, client_settings, environment
from nemo_like.data_plane.mooncake_digests import DigestingClient
from nemo_like.data_plane.options import DataPlaneConfig
from nemo_like.data_plane.segments import Segment, by_columns
from nemo_like.data_plane.storage_errors import CapacityExceeded, CorruptData, DeadlineExceeded, StorageFailed
from nemo_like.data_plane.storage_import import STORAGE_ENVIRONMENT

_SIMPLE, _MOONCAKE = "SimpleStorage", "MooncakeStore"  # as TransferQueue calls them
_T = TypeVar("_T")

# Every key is stored with its own name as one more value. TransferQueue gives the index of a key that was
# cleared to a new key, and a reader that still looks for the first must not take the new key's values for it.
_KEY_COLUMN = "segment key"

# Mooncake's code for "no segment has room"; TransferQueue has it only in the text of its error.
_IS_FULL = "-200"
_FULL_MESSAGE = (
    "Mooncake's storage units have no room for the write, of which nothing was kept. Raise "
    "data_plane.mooncake_cfg.segment_gib or data_plane.num_storage_units, or store fewer samples or columns "
    "at a time"
)

# How long a process that disconnects waits for its transfers under way.
_GRACE_S = 5.0
# How long to wait, after a request failed, for news of a death that may have caused it.
_CAUSE_GRACE_S = 2.0


@dataclass(frozen=True, slots=True)
class StorageAddresses:
    """Where a run's TransferQueue is, and the secret that it asks for; the host sends it to every client."""

    secret: Secret
    controller: Any  # its address record
    backend: str  # TransferQueue's name of the storage backend
    backend_config: Mapping[str, Any]


def _connected(addresses: StorageAddresses, client_id: str) -> AsyncTransferQueueClient:
    """Connect this process and return TransferQueue's client.

    Raises StorageFailed when it can't be reached.
    """
    if addresses.backend == _MOONCAKE:
        os.environ.update(environment(ray.util.get_node_ip_address()))
    client = AsyncTransferQueueClient(
        f"client_{client_id}_{os.getpid()}", addresses.controller, zmq_io_threads=1
    )
    guard(addresses.secret, client.zmq_context)
    try:
        with guarding(addresses.secret):
            client.initialize_storage_manager(addresses.backend, dict(addresses.backend_config))
        manager = client.storage_manager
        guard(addresses.secret, manager.zmq_context)
        if addresses.backend == _MOONCAKE:
            manager.storage_client = DigestingClient(manager.storage_client)
        else:
            manager.notify_data_update = _unnoticed
    except (ImportError, RuntimeError, TimeoutError) as error:
        raise StorageFailed(f"{addresses.backend} can't be reached from this process: {error}") from error
    return client


async def _unnoticed(*_args: Any, **_kwargs: Any) -> None:
    """Do not tell the controller which columns were put: nobody asks it. Only Mooncake's keys are freed by
    their columns, which it must know."""


async def _unblocked(addresses: StorageAddresses, work: Coroutine[Any, Any, _T]) -> _T:
    """Await a get or a clearing, and return its result.

    With Mooncake such a call blocks its thread, so it gets a thread and an event loop of its own.
    """
    if addresses.backend == _MOONCAKE:
        return await asyncio.to_thread(asyncio.run, work)
    return await work


class TransferQueueStorage:
    """A ``host.Storage`` that owns the processes of one TransferQueue."""

    def __init__(self, cfg: DataPlaneConfig, logs_directory: str | None, *, has_mooncake: bool) -> None:
        """Prepare a start, of Mooncake's units or of TransferQueue's own.

        Each process will write a log into ``logs_directory``, or where Ray keeps logs if None.
        """
        self._cfg, self._has_mooncake = cfg, has_mooncake
        self._secret = Secret.new()
        self._logs_directory = logs_directory
        self._actors: dict[str, Any] = {}
        self._master: Master | None = None
        self._addresses: StorageAddresses
        self._client: AsyncTransferQueueClient | None = None

    async def start(self, timeout_s: float) -> StorageAddresses:
        """Start the processes and return their addresses.

        Raises StorageFailed when they can't be placed within ``timeout_s``, or when one dies.
        """
        needed, total = 1 + self._cfg.num_storage_units, ray.cluster_resources().get("CPU", 0.0)
        if total < needed:
            raise StorageFailed(f"{self._needs(needed)}; the cluster has {total:g}. Raise cluster.num_cpus")
        # Without polling mode the controller sleeps in its only request thread, which holds up every client.
        self._start_actor("controller", TransferQueueController, secret=self._secret, polling_mode=True)
        try:
            async with asyncio.timeout(timeout_s):
                if self._has_mooncake:
                    backend, settings = _MOONCAKE, await self._start_mooncake()
                else:
                    backend, settings = _SIMPLE, await self._start_simple()
                controller = await self._actors["controller"].get_zmq_server_info.remote()
                self._addresses = StorageAddresses(self._secret, controller, backend, settings)
                self._client = await asyncio.to_thread(_connected, self._addresses, "host")
                await self._open_logs()
        except TimeoutError:
            free = ray.available_resources().get("CPU", 0.0)
            raise StorageFailed(
                f"TransferQueue did not start within {timeout_s:g} s. {self._needs(needed)}; the cluster has "
                f"{total:g}, {free:g} of them free now. Raise cluster.num_cpus or cluster.start_timeout_s"
            ) from None
        except RayActorError as error:
            raise StorageFailed(f"a process of TransferQueue died while it started: {error}") from error
        except RayTaskError as error:
            raise StorageFailed(f"the storage did not start: {error.cause or error}") from error
        return self._addresses

    async def death(self) -> str:
        """Wait until one of the processes is gone, and return which one and why."""
        # An actor's death is noticed only by a call that fails, so each actor gets one that never returns.
        watches: dict[asyncio.Future[Any], str] = {
            asyncio.ensure_future(actor.__ray_call__.remote(_wait_forever)): name
            for name, actor in self._actors.items()
        }
        if self._master is not None:
            watches[asyncio.ensure_future(self._master.ended())] = "mooncake_master"
        ended, others = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
        for watch in others:
            watch.cancel()
        first = ended.pop()
        why = first.exception()
        return f"TransferQueue's {watches[first]} died" + (f" ({type(why).__name__})" if why else "")

    async def register(self, storage_id: str, keys: Sequence[str]) -> BatchMeta:
        """Make keys known to the controller, and return its description of them, in their order."""
        assert self._client is not None
        meta = await self._client.async_kv_retrieve_meta(list(keys), storage_id, create=True)
        if len(meta) != len(keys):
            raise CorruptData(f"TransferQueue registered {len(meta)} of {len(keys)} keys")
        return meta

    async def clear(self, segments: Sequence[Segment]) -> None:
        """Free these segments' values and keys."""
        assert self._client is not None
        # Clear segments of the same columns together. Mooncake frees by column, also what was never saved.
        for columns, group in itertools.groupby(segments, key=lambda segment: segment.columns):
            meta = _described(list(group))
            fields = {name: NonTensorStack(*[None] * len(meta)) for name in (*columns, _KEY_COLUMN)}
            meta.add_fields(TensorDict(fields, batch_size=len(meta)))
            await _unblocked(self._addresses, self._client.async_clear_samples(meta))

    async def clear_partition(self, storage_id: str) -> None:
        """Free all values and keys that are left in a partition."""
        assert self._client is not None
        # Mooncake refuses to clear a partition that has no column left.
        if self._has_mooncake and not (await self._client.async_kv_list(storage_id)).get(storage_id):
            return
        await _unblocked(self._addresses, self._client.async_clear_partition(storage_id))

    async def stop(self) -> None:
        """Kill the processes; safe to call twice."""
        if self._client is not None:
            client, self._client = self._client, None
            await asyncio.to_thread(client.close)
        while self._actors:
            ray.kill(self._actors.popitem()[1])
        if self._master is not None:
            self._master.stop()

    async def _start_simple(self) -> dict[str, Any]:
        config = {"total_storage_size": None, "num_data_storage_units": self._cfg.num_storage_units}
        for name in self._unit_names():
            self._start_actor(name, SimpleStorageUnit, secret=self._secret, config=config)
        units = [self._actors[name] for name in self._unit_names()]
        addresses = await asyncio.gather(*(unit.get_zmq_server_info.remote() for unit in units))
        return {"zmq_info": {address.id: address for address in addresses}}

    async def _start_mooncake(self) -> dict[str, Any]:
        cfg = self._cfg.mooncake_cfg
        self._master = Master(cfg, ray.util.get_node_ip_address())
        address = await self._master.start()
        for name in self._unit_names():
            self._start_actor(name, MooncakeStorageUnit, cfg=cfg, master_address=address)
        await asyncio.gather(*(self._actors[name].mount.remote() for name in self._unit_names()))
        return client_settings(cfg, address)

    def _unit_names(self) -> list[str]:
        return [f"storage unit {unit}" for unit in range(self._cfg.num_storage_units)]

    def _start_actor(self, name: str, actor_class: type, **kwargs: Any) -> None:
        options = {
            "num_cpus": 1,
            "scheduling_strategy": "SPREAD",
            "runtime_env": runtime_env(STORAGE_ENVIRONMENT),
        }
        self._actors[name] = ray.remote(actor_class).options(**options).remote(**kwargs)

    async def _open_logs(self) -> None:
        if self._logs_directory is not None:
            await asyncio.gather(
                *(
                    actor.__ray_call__.remote(_log_to, f"{self._logs_directory}/{name.replace(' ', '-')}.log")
                    for name, actor in self._actors.items()
                )
            )

    def _needs(self, num_cpus: int) -> str:
        return (
            "TransferQueue's controller and data_plane.num_storage_units="
            f"{self._cfg.num_storage_units} units need {num_cpus} CPUs"
        )


class TransferQueueStore:
    """A ``client.Store`` that moves values between this process and TransferQueue.

    Several threads may use it.
    """

    def __init__(
        self, addresses: StorageAddresses, client_id: str, failure: concurrent.futures.Future[str]
    ) -> None:
        """Connect this process. Raises StorageFailed when TransferQueue can't be reached.

        ``failure`` is done when a process of the storage dies, and says which; every wait then ends.
        """
        self._addresses, self._failure = addresses, failure
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="data-plane", daemon=True)
        self._thread.start()
        self._client = _connected(addresses, client_id)

    def save(self, segments: Sequence[Segment], values: Stored, timeout_s: float) -> BatchMeta:
        """Store values under reserved keys, and return the description with which readers load them.

        Raises CapacityExceeded, StorageFailed or DeadlineExceeded.
        """
        columns = {name: NonTensorStack(*arrays) for name, arrays in values.items()}
        keys = NonTensorStack(*[segment.key for segment in segments])
        data = TensorDict({**columns, _KEY_COLUMN: keys}, batch_size=len(segments))
        meta = _described(segments)
        try:
            # The client's ``async_put`` would also send the controller tags, of which there are none.
            self._finish(self._client.storage_manager.put_data(data, meta), "put", timeout_s)
        except StorageFailed as error:
            if self._addresses.backend == _MOONCAKE and _IS_FULL in str(error):
                raise CapacityExceeded(_FULL_MESSAGE) from error
            raise
        return meta.add_fields(data)

    def load(self, segments: Sequence[Segment], timeout_s: float) -> list[Loaded]:
        """Return each segment's values, one array per column.

        Raises StorageFailed, DeadlineExceeded, or CorruptData when a key has the values of another segment,
        or values that were never saved under it.
        """
        return self._finish(self._get(segments), "get", timeout_s)

    async def _get(self, segments: Sequence[Segment]) -> list[Loaded]:
        """Return what ``load`` does. A request is for segments of the same columns, and all are under way at
        once."""
        groups = by_columns(segments).items()
        answers = await asyncio.gather(*(self._get_alike(alike, columns) for columns, alike in groups))
        loaded = {key: values for answer in answers for key, values in answer.items()}
        return [loaded[segment.key] for segment in segments]

    async def _get_alike(self, segments: Sequence[Segment], columns: Sequence[str]) -> dict[str, Loaded]:
        """Return by key the values of segments from which the same columns are loaded."""
        meta = _described(segments).select_fields([*columns, _KEY_COLUMN])
        data = await _unblocked(self._addresses, self._client.storage_manager.get_data(meta))
        values = {name: data.get(name).tolist() for name in (*columns, _KEY_COLUMN)}
        for segment, key in zip(segments, values[_KEY_COLUMN], strict=True):
            if segment.key != key:
                raise CorruptData(f"segment {segment.key!r} was asked for, and segment {key!r} came")
        return {
            segment.key: {name: values[name][position] for name in columns}
            for position, segment in enumerate(segments)
        }

    def close(self) -> None:
        """Wait until this process's transfers have ended, and disconnect it."""
        ending = asyncio.run_coroutine_threadsafe(self._loop.shutdown_default_executor(), self._loop)
        _, unfinished = concurrent.futures.wait([ending], timeout=_GRACE_S)
        if unfinished:
            return  # A transfer hangs, and to close what it uses would crash: leave it to the process's end.
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_GRACE_S)
        self._client.close()

    def _finish(self, work: Coroutine[Any, Any, _T], doing: str, timeout_s: float) -> _T:
        """Wait until TransferQueue has done ``work``, and return the result.

        Raises StorageFailed when the work fails or a process of the storage dies, DeadlineExceeded after
        ``timeout_s``, and CorruptData where the work does.
        """
        running = asyncio.run_coroutine_threadsafe(work, self._loop)
        waits: list[concurrent.futures.Future[Any]] = [running, self._failure]
        concurrent.futures.wait(waits, timeout_s, return_when=concurrent.futures.FIRST_COMPLETED)
        if not running.done():
            running.cancel()
            if self._failure.done():
                raise StorageFailed(f"{self._cause()}, noticed in a {doing}")
            raise DeadlineExceeded(
                f"a {doing} did not finish in the {timeout_s:.1f} s that data_plane.timeout_s left for it, "
                "though the storage's processes live"
            )
        error = running.exception()
        if isinstance(error, CorruptData):
            raise error
        if error is not None:
            concurrent.futures.wait([self._failure], timeout=_CAUSE_GRACE_S)
            cause = self._cause() if self._failure.done() else f"{type(error).__name__}: {error}"
            raise StorageFailed(f"{doing} failed: {cause}") from error
        return running.result()

    def _cause(self) -> str:
        error = self._failure.exception()
        if error is None:
            return self._failure.result()
        return f"the data plane's host died ({type(error).__name__})"


def _described(segments: Sequence[Segment]) -> BatchMeta:
    """Return TransferQueue's description of the segments' keys, in their order."""
    metas = []
    for _, group in itertools.groupby(segments, key=lambda segment: id(segment.write)):
        together = list(group)
        metas.append(together[0].write.select_samples([segment.position for segment in together]))
    return metas[0] if len(metas) == 1 else BatchMeta.concat(metas)


def _log_to(_actor: object, path: str) -> None:
    log_to(path)


def _wait_forever(_actor: object) -> None:
    threading.Event().wait()
