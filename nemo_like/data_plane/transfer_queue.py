"""TransferQueue as storage of the data plane; its only importer.

A run has a TransferQueue of its own: controller and storage units are actors under no public name,
so that two runs on one Ray cluster never meet and none can close the other's. The values are in
TransferQueue's own storage units or in Mooncake's. A key is a segment, its value one contiguous numpy
array per column. TransferQueue leaves out what it can't find, so each answer is compared with what was
asked for. It never notices that one of its processes died, so the host watches them and every client
watches the host: a call that waits fails when one of them is gone.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import os
import socket
import threading
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from tensordict import NonTensorStack, TensorDict
from transfer_queue.client import AsyncTransferQueueClient
from transfer_queue.controller import TransferQueueController
from transfer_queue.metadata import BatchMeta
from transfer_queue.storage.simple_storage import SimpleStorageUnit

from nemo_like.cluster.actors import Call
from nemo_like.config.schema import DataPlaneConfig, StorageBackend
from nemo_like.data_plane.client import PackedDataPlane, Stored
from nemo_like.data_plane.errors import (
    CapacityExceeded,
    CorruptData,
    DataPlaneError,
    DeadlineExceeded,
    StorageFailed,
)
from nemo_like.data_plane.factory import TRANSFER_QUEUE_ENVIRONMENT, DataPlaneSpec
from nemo_like.data_plane.mooncake import Master, MooncakeStorageUnit, client_settings, environment
from nemo_like.data_plane.observed import ObservedStore
from nemo_like.data_plane.operations import OperationLog
from nemo_like.data_plane.rpc import RpcClient
from nemo_like.data_plane.segments import (
    Commit,
    PartitionInfo,
    Replacement,
    Rows,
    Segment,
    Thinned,
    Want,
)

_SIMPLE, _MOONCAKE = "SimpleStorage", "MooncakeStore"  # as TransferQueue calls them

# Mooncake's code for "no segment has room", in the text in which TransferQueue passes it on.
_MOONCAKE_IS_FULL = "-200"
_FULL_MESSAGE = (
    "Mooncake's storage units have no room for the write, of which nothing was kept. Raise "
    "data_plane.mooncake_cfg.segment_gib or data_plane.num_storage_units, or store fewer samples or columns "
    "at a time"
)

# How much later than the host's own deadline a client gives up, so that the host's better message wins.
_GRACE_S = 5.0


@dataclass(frozen=True, slots=True)
class StorageAddresses:
    """Where TransferQueue is."""

    controller: Any  # its address record
    backend: str  # TransferQueue's name of the storage backend
    backend_config: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Connection:
    """What one process needs to take part."""

    client_id: str  # unique within the run
    registry: str  # where the host answers
    storage: StorageAddresses


class Storage:
    """The processes of one TransferQueue; used by the host, on its event loop."""

    def __init__(self, cfg: DataPlaneConfig) -> None:
        self._cfg = cfg
        self._actors: dict[str, Any] = {}
        self._master: Master | None = None

    async def start(self, timeout_s: float) -> StorageAddresses:
        """Raises StorageFailed when the cluster can't place the processes in time, or one dies."""
        needed, total = 1 + self._cfg.num_storage_units, ray.cluster_resources().get("CPU", 0.0)
        if total < needed:
            raise StorageFailed(f"{self._needs(needed)}; the cluster has {total:g}. Raise cluster.num_cpus")
        # Polling mode: otherwise the controller sleeps in its only request thread, for every client.
        self._place("controller", TransferQueueController, polling_mode=True)
        try:
            async with asyncio.timeout(timeout_s):
                if self._cfg.backend is StorageBackend.simple:
                    backend, settings = _SIMPLE, await self._start_simple()
                else:
                    backend, settings = _MOONCAKE, await self._start_mooncake()
                controller = await self._actors["controller"].get_zmq_server_info.remote()
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
        return StorageAddresses(controller, backend, settings)

    async def death(self) -> str:
        """Returns when the first of the processes is gone: its name and why."""
        # A call that never returns fails when its actor dies, which is the only notice there is.
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

    def stop(self) -> None:
        """Kill the processes; safe to call twice."""
        while self._actors:
            ray.kill(self._actors.popitem()[1])
        if self._master is not None:
            self._master.stop()

    async def _start_simple(self) -> dict[str, Any]:
        config = {"total_storage_size": None, "num_data_storage_units": self._cfg.num_storage_units}
        units = self._place_units(SimpleStorageUnit, config=config)
        addresses = await asyncio.gather(*(unit.get_zmq_server_info.remote() for unit in units))
        return {"zmq_info": {address.id: address for address in addresses}}

    async def _start_mooncake(self) -> dict[str, Any]:
        cfg = self._cfg.mooncake_cfg
        self._master = Master(cfg, ray.util.get_node_ip_address())
        address = await self._master.start()
        units = self._place_units(ray.remote(MooncakeStorageUnit), cfg=cfg, master_address=address)
        await asyncio.gather(*(unit.mount.remote() for unit in units))
        return client_settings(cfg, address)

    def _place_units(self, actor_class: Any, **kwargs: Any) -> list[Any]:
        return [
            self._place(f"storage unit {unit}", actor_class, **kwargs)
            for unit in range(self._cfg.num_storage_units)
        ]

    def _place(self, name: str, actor_class: Any, **kwargs: Any) -> Any:
        options = {
            "num_cpus": 1,
            "scheduling_strategy": "SPREAD",
            "runtime_env": {"env_vars": TRANSFER_QUEUE_ENVIRONMENT},
        }
        self._actors[name] = actor_class.options(**options).remote(**kwargs)
        return self._actors[name]

    def _needs(self, num_cpus: int) -> str:
        return (
            "TransferQueue's controller and data_plane.num_storage_units="
            f"{self._cfg.num_storage_units} units need {num_cpus} CPUs"
        )


class Session:
    """One process's connections to registry and storage, and the event loop they live on."""

    def __init__(self, connection: Connection) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="data-plane", daemon=True)
        self._thread.start()
        self.client_id = connection.client_id
        storage = connection.storage
        self._blocks = storage.backend == _MOONCAKE
        if storage.backend == _MOONCAKE:
            os.environ.update(environment(ray.util.get_node_ip_address()))
        self._client = AsyncTransferQueueClient(
            f"client_{connection.client_id}_{os.getpid()}", storage.controller, zmq_io_threads=1
        )
        try:
            self._client.initialize_storage_manager(storage.backend, dict(storage.backend_config))
        except (ImportError, RuntimeError, TimeoutError) as error:
            raise StorageFailed(f"{storage.backend} can't be reached from this process: {error}") from error
        self._registry: RpcClient = self.start(_connected(connection.registry)).result()

    def start(self, work: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        """Run a coroutine on the session's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def ask(self, method: str, *args: Any) -> Coroutine[Any, Any, Any]:
        """One request to the host."""
        return self._registry.call(method, *args)

    async def save(self, storage_id: str, keys: Sequence[str], values: Stored) -> list[Any]:
        """Store segments, all or none; an address for each. Raises CapacityExceeded."""
        meta = await self._client.async_kv_retrieve_meta(
            keys=list(keys), partition_id=storage_id, create=True
        )
        if meta.size != len(keys):
            raise CorruptData(f"TransferQueue registered {meta.size} of {len(keys)} keys")
        fields = {name: NonTensorStack(*arrays) for name, arrays in values.items()}
        try:
            # Straight to the storage manager: the client's own put also rewrites torch's thread count.
            await self._client.storage_manager.put_data(TensorDict(fields, batch_size=len(keys)), meta)
        except Exception as error:
            addresses: list[Any] = [(index, {}) for index in meta.global_indexes]
            await self._client.async_clear_samples(_batch(storage_id, addresses, fields))
            if _MOONCAKE_IS_FULL in str(error):
                raise CapacityExceeded(_FULL_MESSAGE) from error
            raise
        return list(zip(meta.global_indexes, meta._custom_backend_meta, strict=True))

    async def load(self, storage_id: str, addresses: Sequence[Any], columns: Sequence[str]) -> Stored:
        """Values at the addresses that ``save`` gave. Raises CorruptData when something is left out."""
        reading = self._client.storage_manager.get_data(_batch(storage_id, addresses, columns))
        # Mooncake's manager blocks the event loop on which it reads.
        data = await (asyncio.to_thread(asyncio.run, reading) if self._blocks else reading)
        if set(data.keys()) != set(columns) or data.batch_size[0] != len(addresses):
            raise CorruptData(
                f"TransferQueue returned columns {sorted(data.keys())} of {data.batch_size[0]} segments, "
                f"asked for {sorted(columns)} of {len(addresses)}"
            )
        return {name: data.get(name).tolist() for name in columns}

    async def drop(self, storage_id: str, segments: Sequence[Segment]) -> None:
        # Not by key: TransferQueue then drops no more than the columns that all of them have.
        columns = {name for segment in segments for name in segment.columns}
        addresses = [segment.address for segment in segments]
        if segments:
            await self._client.async_clear_samples(_batch(storage_id, addresses, columns))

    async def drop_partition(self, storage_id: str) -> None:
        await self._client.async_clear_partition(storage_id)

    def close(self) -> None:
        ending = [self.start(self._registry.close()), self.start(self._loop.shutdown_default_executor())]
        _, unfinished = concurrent.futures.wait(ending, timeout=_GRACE_S)
        if unfinished:
            return  # A transfer hangs, and closing what it uses would crash: it ends with the process.
        self._client.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_GRACE_S)


class TransferQueueDataPlane(PackedDataPlane):
    """The data plane of one process."""

    def __init__(self, spec: DataPlaneSpec, log: OperationLog | None) -> None:
        """Connects, which waits for the storage to be up; raises StorageFailed when it can't be reached.
        What moves is counted in ``log``."""
        self._session = Session(_connect(spec))
        remote = _Remote(self._session, spec.host.submit("storage_failure"))
        super().__init__(
            remote,
            remote if log is None else ObservedStore(remote, log),
            client_id=self._session.client_id,
            writer=f"process {os.getpid()} on {socket.gethostname()}",
            timeout_s=spec.timeout_s,
        )

    def close(self) -> None:
        """Disconnect this process; the storage lives on."""
        self._session.close()


class _Remote:
    """Catalog and store; a wait ends with the answer, the deadline, or the death of what it waits for."""

    def __init__(self, session: Session, failure: Call) -> None:
        self._session = session
        self._failure: concurrent.futures.Future[str] = failure.ref.future()

    def describe(self, name: str, timeout_s: float) -> PartitionInfo:
        return self._finish(self._session.ask("describe", name), "describe", name, timeout_s)

    def reserve(self, info: PartitionInfo, sizes: Mapping[str, int], timeout_s: float) -> None:
        work = self._session.ask("reserve", info.name, info.storage_id, sizes)
        self._finish(work, "reserve", info.name, timeout_s)

    def release(self, info: PartitionInfo, keys: Sequence[str], timeout_s: float) -> None:
        self._finish(self._session.ask("release", info.storage_id, keys), "release", info.name, timeout_s)

    def commit(self, info: PartitionInfo, commit: Commit, timeout_s: float) -> None:
        work = self._session.ask("commit", info.name, info.storage_id, commit)
        self._finish(work, "commit", info.name, timeout_s)

    def locate(self, info: PartitionInfo, wants: Sequence[Want], timeout_s: float) -> list[Segment]:
        work = self._session.ask("locate", info.name, info.storage_id, wants, timeout_s)
        return self._finish(work, "locate", info.name, timeout_s + _GRACE_S)

    def clear(self, info: PartitionInfo, rows: Rows, timeout_s: float) -> Sequence[Thinned]:
        work = self._session.ask("clear", info.name, info.storage_id, rows)
        return self._finish(work, "clear", info.name, timeout_s + _GRACE_S)

    def replace(
        self, info: PartitionInfo, replacements: Sequence[Replacement], timeout_s: float
    ) -> Sequence[Thinned]:
        work = self._session.ask("replace", info.name, info.storage_id, replacements)
        return self._finish(work, "clear", info.name, timeout_s + _GRACE_S)

    def save(
        self, info: PartitionInfo, keys: Sequence[str], values: Stored, timeout_s: float
    ) -> Sequence[Any]:
        return self._finish(self._session.save(info.storage_id, keys, values), "put", info.name, timeout_s)

    def load(
        self, info: PartitionInfo, segments: Sequence[Segment], columns: Sequence[str], timeout_s: float
    ) -> Stored:
        addresses = [segment.address for segment in segments]
        return self._finish(
            self._session.load(info.storage_id, addresses, columns), "get", info.name, timeout_s
        )

    def discard(self, info: PartitionInfo, segments: Sequence[Segment], timeout_s: float) -> None:
        self._finish(self._session.drop(info.storage_id, segments), "discard", info.name, timeout_s)

    def _finish(self, work: Coroutine[Any, Any, Any], doing: str, partition: str, timeout_s: float) -> Any:
        future = self._session.start(work)
        concurrent.futures.wait(
            [future, self._failure], timeout=timeout_s, return_when=concurrent.futures.FIRST_COMPLETED
        )
        if not future.done():
            future.cancel()
            if self._failure.done():
                raise StorageFailed(f"partition {partition!r}: {self._cause()}, noticed in {doing}")
            raise DeadlineExceeded(
                f"partition {partition!r}: a {doing} did not finish in the {timeout_s:.1f} s that "
                "data_plane.timeout_s left for it, though the storage's processes live"
            )
        try:
            return future.result()
        except DataPlaneError:
            raise
        except Exception as error:
            cause = self._cause() if self._failure.done() else f"{type(error).__name__}: {error}"
            raise StorageFailed(f"partition {partition!r}: {doing} failed: {cause}") from error

    def _cause(self) -> str:
        error = self._failure.exception()
        if error is None:
            return self._failure.result()
        return f"the data plane's host died ({type(error).__name__})"


def _connect(spec: DataPlaneSpec) -> Connection:
    try:
        return spec.host.submit("connect").result(spec.start_timeout_s + _GRACE_S)
    except GetTimeoutError as error:
        raise StorageFailed(
            f"the data plane's host did not answer within {spec.start_timeout_s:g} s; its log is "
            f"{spec.host.log_path or 'not recorded'}"
        ) from error
    except RayTaskError as error:
        if isinstance(error.cause, DataPlaneError):
            raise error.cause from None
        raise
    except RayActorError as error:
        raise StorageFailed(f"the data plane's host is gone ({type(error).__name__})") from error


def _batch(storage_id: str, addresses: Sequence[Any], columns: Iterable[str]) -> BatchMeta:
    """TransferQueue's description of keys by their addresses, which spares a request to the controller."""
    return BatchMeta(
        global_indexes=[index for index, _ in addresses],
        partition_ids=[storage_id] * len(addresses),
        field_schema={name: {"dtype": None, "shape": None} for name in columns},
        production_status=np.ones(len(addresses), np.int8),
        _custom_backend_meta=[backend_meta for _, backend_meta in addresses],
    )


async def _connected(address: str) -> RpcClient:
    return RpcClient(address)


def _wait_forever(_actor: object) -> None:
    threading.Event().wait()
