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
import threading
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import ray
from ray._private import ray_constants
from ray.exceptions import RayActorError, RayTaskError
from transfer_queue.client import AsyncTransferQueueClient
from transfer_queue.controller import TransferQueueController
from transfer_queue.metadata import BatchMeta
from transfer_queue.storage.simple_storage import SimpleStorageUnit
from transfer_queue.utils.zmq_utils import (
    STORAGE_MANAGER_IDENTITY_PREFIX,
    ZMQMessage,
    ZMQRequestType,
    ZMQServerInfo,
)

from nemo_like.config.schema import DataPlaneConfig, StorageBackend
from nemo_like.data_plane.client import Stored
from nemo_like.data_plane.deadline import Deadline
from nemo_like.data_plane.errors import CorruptData, StorageFailed
from nemo_like.data_plane.exchange import Alarm, Exchange, GaveUp, Request
from nemo_like.data_plane.factory import TRANSFER_QUEUE_ENVIRONMENT, import_storage
from nemo_like.data_plane.mooncake import Master, MooncakeStorageUnit, client_settings, environment
from nemo_like.data_plane.mooncake_transfer import MooncakeMemory, MooncakeTransfer
from nemo_like.data_plane.rpc import decode_answer, encode_call
from nemo_like.data_plane.segments import Segment

_SIMPLE, _MOONCAKE = "SimpleStorage", "MooncakeStore"  # as TransferQueue calls them

# From its client of Mooncake, about a partition with keys of which none has a value.
_NOTHING_STORED = "lack of `field_names`"

# What TransferQueue notes of a column whose values are arrays of many lengths.
_SCHEMA = {"dtype": None, "shape": None, "is_nested": False, "is_non_tensor": True}

# The memory of one step is used again in the next, not given back in between: fresh pages cost more than
# to fill them.
_STORAGE_MEMORY = {"MALLOC_MMAP_THRESHOLD_": str(1 << 25), "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}

# Ray calls the function before it loads the actor's class.
_IMPORTS = {
    ray_constants.WORKER_PROCESS_SETUP_HOOK_ENV_VAR: (
        f"{import_storage.__module__}.{import_storage.__name__}"
    )
}

# For transfers under way when a process disconnects.
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
            "runtime_env": {"env_vars": {**TRANSFER_QUEUE_ENVIRONMENT, **_STORAGE_MEMORY, **_IMPORTS}},
        }
        self._actors[name] = actor_class.options(**options).remote(**kwargs)
        return self._actors[name]

    def _needs(self, num_cpus: int) -> str:
        return (
            "TransferQueue's controller and data_plane.num_storage_units="
            f"{self._cfg.num_storage_units} units need {num_cpus} CPUs"
        )


class Session:
    """One process's connections to registry and storage."""

    def __init__(self, connection: Connection, failure: concurrent.futures.Future[str]) -> None:
        """Waits end when ``failure`` is done."""
        # What is rare, or blocks, happens on this loop and its threads.
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="data-plane", daemon=True)
        self._thread.start()
        self.client_id = connection.client_id
        storage, node_address = connection.storage, ray.util.get_node_ip_address()
        if storage.backend == _MOONCAKE:
            os.environ.update(environment(node_address))
        self._client = AsyncTransferQueueClient(
            f"client_{connection.client_id}_{os.getpid()}", storage.controller, zmq_io_threads=1
        )
        try:
            self._client.initialize_storage_manager(storage.backend, dict(storage.backend_config))
        except (ImportError, RuntimeError, TimeoutError) as error:
            raise StorageFailed(f"{storage.backend} can't be reached from this process: {error}") from error
        alarm = Alarm()
        failure.add_done_callback(lambda _: alarm.ring())
        identity = STORAGE_MANAGER_IDENTITY_PREFIX + connection.client_id
        self._exchange = Exchange(identity, alarm, node_address)
        self._registry = connection.registry
        self._controller = _Peer(self._exchange, storage.controller, "request_handle_socket")
        self._transfer: _Transfer = (
            MooncakeTransfer(MooncakeMemory(self._client.storage_manager.storage_client), self._loop, failure)
            if storage.backend == _MOONCAKE
            else _UnitTransfer(self._exchange, list(storage.backend_config["zmq_info"].values()))
        )
        self._announced = threading.local()  # what a thread told the controller, which did not confirm yet

    def start(self, work: Coroutine[Any, Any, Any]) -> concurrent.futures.Future[Any]:
        """Run a coroutine on the session's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def ask(self, method: str, *args: Any, timeout_s: float) -> Any:
        """One request to the host. Returns once the controller too knows of what this thread saved."""
        self._exchange.send(Request(self._registry, encode_call(method, args)))
        answer, *confirmed = self._exchange.receive([self._registry, *self._unconfirmed()], timeout_s)
        _check_confirmed(confirmed)
        return decode_answer(answer)

    def register(self, storage_id: str, keys: Sequence[str], timeout_s: float) -> list[int]:
        """New keys with TransferQueue's controller; the indexes under which ``save`` stores."""
        deadline = Deadline(timeout_s)
        self._confirm(timeout_s)
        body = {"keys": list(keys), "partition_id": storage_id, "create": True}
        kind, answer = ZMQRequestType.KV_RETRIEVE_META, ZMQRequestType.KV_RETRIEVE_META_RESPONSE
        metadata = self._controller.ask(kind, answer, body, deadline.remaining())["metadata"]
        indexes: list[int] = metadata.global_indexes
        if len(indexes) != len(keys):
            raise CorruptData(f"TransferQueue registered {len(indexes)} of {len(keys)} keys")
        return indexes

    def save(self, storage_id: str, indexes: Sequence[int], values: Stored, timeout_s: float) -> list[Any]:
        """Store segments under registered indexes, all or none; an address for each.

        Raises CapacityExceeded.
        """
        deadline = Deadline(timeout_s)
        self._confirm(timeout_s)
        try:
            stored = self._transfer.save(indexes, values, deadline.remaining())
        except GaveUp:
            raise
        except Exception:
            clearing = self._client.async_clear_samples(
                _batch(storage_id, [(i, {}) for i in indexes], values)
            )
            concurrent.futures.wait([self.start(clearing)], deadline.remaining())
            raise
        self._announce(storage_id, indexes, values, stored)
        return list(zip(indexes, stored, strict=True))

    def load(self, addresses: Sequence[Any], columns: Sequence[str], timeout_s: float) -> Stored:
        """Values at the addresses that ``save`` gave."""
        return self._transfer.load(addresses, columns, timeout_s)

    async def drop(self, storage_id: str, segments: Sequence[Segment]) -> None:
        # Not by key: TransferQueue then drops no more than the columns that all of them have.
        columns = {name for segment in segments for name in segment.columns}
        addresses = [segment.address for segment in segments]
        if segments:
            await self._client.async_clear_samples(_batch(storage_id, addresses, columns))

    async def drop_partition(self, storage_id: str) -> None:
        try:
            await self._client.async_clear_partition(storage_id)
        except RuntimeError as error:
            if _NOTHING_STORED not in str(error):
                raise
            kind, answer = ZMQRequestType.CLEAR_PARTITION, ZMQRequestType.CLEAR_PARTITION_RESPONSE
            await asyncio.to_thread(
                self._controller.ask, kind, answer, {"partition_id": storage_id}, _GRACE_S
            )

    def close(self) -> None:
        ending = self.start(self._loop.shutdown_default_executor())
        _, unfinished = concurrent.futures.wait([ending], timeout=_GRACE_S)
        if unfinished:
            return  # A transfer hangs, and closing what it uses would crash: it ends with the process.
        self._exchange.close()
        self._client.close()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_GRACE_S)

    def _announce(
        self, storage_id: str, indexes: Sequence[int], values: Stored, stored: Sequence[Mapping[str, Any]]
    ) -> None:
        """Tell TransferQueue's controller what is there. Nobody reads by what it knows, so its answer is
        awaited together with that of the host, in the commit that follows."""
        body = {
            "partition_id": storage_id,
            "global_indexes": list(indexes),
            "field_schema": dict.fromkeys(values, _SCHEMA),
            "custom_backend_meta": dict(zip(indexes, stored, strict=True)),
        }
        self._controller.send(ZMQRequestType.NOTIFY_DATA_UPDATE, body)
        self._announced.addresses = [self._controller.address]

    def _confirm(self, timeout_s: float) -> None:
        """Wait until the controller knows of what this thread saved before."""
        _check_confirmed(self._exchange.receive(self._unconfirmed(), timeout_s))

    def _unconfirmed(self) -> list[str]:
        """Where this thread has an answer to wait for."""
        addresses: list[str] = self._announced.__dict__.pop("addresses", [])
        return addresses


class _Transfer(Protocol):
    """Moves values between this process and the storage. Raises GaveUp."""

    def save(self, indexes: Sequence[int], values: Stored, timeout_s: float) -> Sequence[Mapping[str, Any]]:
        """What ``load`` needs to know besides the index, for each, by column."""

    def load(self, addresses: Sequence[Any], columns: Sequence[str], timeout_s: float) -> Stored: ...


class _UnitTransfer:
    """Straight to the storage units, as TransferQueue's own manager sends it, but one array per column and
    key and no tensor library in between."""

    def __init__(self, exchange: Exchange, units: Sequence[ZMQServerInfo]) -> None:
        self._exchange = exchange
        self._units = [_Peer(exchange, unit, "put_get_socket") for unit in units]

    def save(self, indexes: Sequence[int], values: Stored, timeout_s: float) -> Sequence[Mapping[str, Any]]:
        routed = self._routed(indexes)
        for unit, positions in routed:
            body = {
                "global_indexes": [indexes[position] for position in positions],
                "data": {
                    name: [arrays[position] for position in positions] for name, arrays in values.items()
                },
                "data_parser": None,
            }
            unit.send(ZMQRequestType.PUT_DATA, body)
        answers = self._exchange.receive([unit.address for unit, _ in routed], timeout_s)
        for frames in answers:
            _body(frames, ZMQRequestType.PUT_DATA_RESPONSE)
        return [{} for _ in indexes]

    def load(self, addresses: Sequence[Any], columns: Sequence[str], timeout_s: float) -> Stored:
        indexes = [index for index, _ in addresses]
        routed = self._routed(indexes)
        for unit, positions in routed:
            body = {"global_indexes": [indexes[position] for position in positions], "fields": list(columns)}
            unit.send(ZMQRequestType.GET_DATA, body)
        answers = self._exchange.receive([unit.address for unit, _ in routed], timeout_s)
        loaded: dict[str, list[Any]] = {name: [None] * len(indexes) for name in columns}
        for (_, positions), frames in zip(routed, answers, strict=True):
            data = _body(frames, ZMQRequestType.GET_DATA_RESPONSE)["data"]
            for name in columns:
                for position, array in zip(positions, data[name], strict=True):
                    loaded[name][position] = array
        return loaded

    def _routed(self, indexes: Sequence[int]) -> list[tuple[_Peer, list[int]]]:
        """Positions by unit, by TransferQueue's rule: the index modulo the number of units."""
        positions: list[list[int]] = [[] for _ in self._units]
        for position, index in enumerate(indexes):
            positions[index % len(self._units)].append(position)
        return [(unit, here) for unit, here in zip(self._units, positions, strict=True) if here]


class _Peer:
    """A process of TransferQueue at the other end of an exchange."""

    def __init__(self, exchange: Exchange, info: ZMQServerInfo, socket: str) -> None:
        self._exchange, self._id = exchange, info.id
        self.address = info.to_addr(socket)

    def send(self, kind: ZMQRequestType, body: Mapping[str, Any]) -> None:
        message = ZMQMessage.create(kind, sender_id="data plane", receiver_id=self._id, body=dict(body))
        self._exchange.send(Request(self.address, message.serialize()))

    def ask(
        self, kind: ZMQRequestType, answer: ZMQRequestType, body: Mapping[str, Any], timeout_s: float
    ) -> dict[str, Any]:
        self.send(kind, body)
        (frames,) = self._exchange.receive([self.address], timeout_s)
        return _body(frames, answer)


def _body(frames: Sequence[Any], expected: ZMQRequestType) -> dict[str, Any]:
    """Of an answer. Raises RuntimeError with its message when it is another than expected."""
    answer = ZMQMessage.deserialize(list(frames))
    if answer.request_type != expected:
        raise RuntimeError(str(answer.body.get("message", answer.request_type)))
    return answer.body


def _check_confirmed(answers: Iterable[Sequence[Any]]) -> None:
    for frames in answers:
        _body(frames, ZMQRequestType.NOTIFY_DATA_UPDATE_ACK)


def _batch(storage_id: str, addresses: Sequence[Any], columns: Iterable[str]) -> BatchMeta:
    """TransferQueue's description of keys by their addresses, which spares a request to the controller."""
    return BatchMeta(
        global_indexes=[index for index, _ in addresses],
        partition_ids=[storage_id] * len(addresses),
        field_schema={name: {"dtype": None, "shape": None} for name in columns},
        production_status=np.ones(len(addresses), np.int8),
        _custom_backend_meta=[backend_meta for _, backend_meta in addresses],
    )


def _wait_forever(_actor: object) -> None:
    threading.Event().wait()
