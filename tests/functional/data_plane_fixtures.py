"""A TransferQueue of one's own on the test session's Ray, and clients in this and in other processes."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from tensordict import NonTensorStack, TensorDict

from nemo_like.batch.columns import Column
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.cluster.actors import ActorHandle, ActorSpec, start_actor
from nemo_like.data_plane.connection import connect
from nemo_like.data_plane.interface import DataPlane
from nemo_like.data_plane.options import DataPlaneConfig, MooncakeConfig, MooncakeProtocol
from nemo_like.data_plane.spec import DataPlaneSpec, host_actor
from nemo_like.data_plane.storage_kinds.mooncake_cpu import missing_mooncake_libraries

START_TIMEOUT_S = 90.0
MOONCAKE_UNIT_BYTES = 64 << 20

needs_mooncake = pytest.mark.skipif(
    bool(missing_mooncake_libraries()),
    reason=f"Mooncake needs system packages: {', '.join(missing_mooncake_libraries().values())}",
)
mooncake = pytest.param("mooncake_cpu", marks=needs_mooncake, id="mooncake_cpu")
simple = pytest.param("simple", id="simple")


def data_plane_config(
    backend: str,
    *,
    timeout_s: float,
    num_units: int = 1,
    capacity_bytes: int | None = None,
    max_open_partitions: int = 1000,
) -> DataPlaneConfig:
    """Small enough for a test; every Mooncake unit has 64 MiB."""
    return DataPlaneConfig(
        backend=backend,
        num_storage_units=num_units,
        capacity_gib=None if capacity_bytes is None else capacity_bytes / 2**30,
        timeout_s=timeout_s,
        max_open_partitions=max_open_partitions,
        log_operations=False,
        mooncake_cfg=MooncakeConfig(
            protocol=MooncakeProtocol.tcp,
            rdma_devices=None,
            segment_gib=MOONCAKE_UNIT_BYTES / 2**30,
            buffer_mib=16,
            master_port=None,
        ),
    )


class TransferQueuePlanes:
    """One run: its host, two clients in this process (each with a cache of its own), control."""

    def __init__(
        self,
        run_id: str,
        cfg: DataPlaneConfig,
        start: Callable[[ActorSpec], ActorHandle] = start_actor,
        log_path: str | None = None,
    ) -> None:
        self.timeout_s = timeout_s = cfg.timeout_s
        self.capacity_bytes = int((cfg.capacity_gib or 0) * 2**30)
        spec = host_actor(cfg, run_id=run_id, start_timeout_s=START_TIMEOUT_S, log_path=log_path)
        # Runs of one driver share its names.
        self.host: ActorHandle = start(replace(spec, name=f"data_plane-{run_id}"))
        self.spec = DataPlaneSpec(
            host=self.host,
            backend=cfg.backend,
            timeout_s=timeout_s,
            start_timeout_s=START_TIMEOUT_S,
            is_observed=False,
        )
        self._clients: list[DataPlane] = []

    def start(self) -> None:
        self.call("ready", deadline_s=START_TIMEOUT_S)

    def client(self) -> DataPlane:
        return self._connected(0)

    def other_client(self) -> DataPlane:
        return self._connected(1)

    def open(self, name: str, columns: Sequence[Column], num_readers: int | None = None) -> None:
        self.call("open_partition", name, tuple(columns), num_readers)

    def close(self, name: str) -> None:
        self.call("close_partition", name)

    def num_stored_keys(self) -> int:
        """As TransferQueue itself counts them."""
        self.call("settled")
        store = self.client()._store
        partitions = store._finish(store._client.async_kv_list(), "count", self.timeout_s)
        return sum(len(keys) for keys in partitions.values())

    def num_stored_bytes(self, partition: str) -> int:
        """Of the partition's values, key by key, as TransferQueue returns them."""
        self.call("settled")
        store = self.client()._store
        columns = [*self.call("describe", partition).columns]
        return store._finish(_num_stored_bytes(store._client, partition, columns), "count", self.timeout_s)

    def call(self, method: str, *args: object, deadline_s: float | None = None) -> Any:
        try:
            return self.host.submit(method, *args).result(deadline_s or self.timeout_s + 10)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None

    def stop(self) -> None:
        for client in self._clients:
            client.close()
        with contextlib.suppress(ray.exceptions.RayActorError):  # a test may have killed it
            self.call("stop")
        self.host.kill()

    def _connected(self, number: int) -> DataPlane:
        while len(self._clients) <= number:
            self._clients.append(connect(self.spec))
        return self._clients[number]


async def _num_stored_bytes(client: Any, partition: str, declared: Sequence[str]) -> int:
    total = 0
    storage_ids = [one for one in await client.async_get_partition_list() if f"/{partition}/" in one]
    for storage_id in storage_ids:
        for key in (await client.async_kv_list(storage_id))[storage_id]:
            meta = await client.async_kv_retrieve_meta(keys=[key], partition_id=storage_id, create=False)
            # The controller knows the columns of Mooncake's keys only.
            for column in meta.field_names or declared:
                if column not in meta.field_names:
                    meta.add_fields(TensorDict({column: NonTensorStack(None)}, batch_size=1))
                try:
                    values = await client.async_get_data(meta.select_fields([column]))
                except (KeyError, RuntimeError) as error:
                    assert "not found" in str(error)  # the key lacks the column
                    continue
                (array,) = values.get(column).tolist()
                total += array.nbytes if isinstance(array, np.ndarray) else 0
    return total


@contextmanager
def started(run_id: str, cfg: DataPlaneConfig) -> Iterator[TransferQueuePlanes]:
    """A run that is up, and is stopped at the end however it fared."""
    planes = TransferQueuePlanes(run_id, cfg)
    try:
        planes.start()
        yield planes
    finally:
        planes.stop()


@contextmanager
def frozen(pid: int) -> Iterator[None]:
    """A process that takes what it is sent and does nothing with it, until the block is left."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


class RemoteClient:
    """A client in a process of its own; the target of an actor."""

    def __init__(self, spec: DataPlaneSpec) -> None:
        self._plane = connect(spec)

    def put(self, partition: str, columns: dict[str, np.ndarray], lengths: Sequence[int]) -> KVBatchMeta:
        return self._plane.put(partition, columns, lengths=lengths, chunk_sizes=[len(lengths)], tags={})

    def fetch(self, meta: KVBatchMeta, columns: Sequence[str]) -> dict[str, object]:
        return dict(self._plane.fetch(meta, columns))

    def disconnect(self) -> None:
        self._plane.close()

    def pid(self) -> int:
        return os.getpid()


def remote_client(spec: DataPlaneSpec) -> ActorHandle:
    target = "tests.functional.data_plane_fixtures:RemoteClient"
    return start_actor(ActorSpec("remote client", target, kwargs={"spec": spec}))


CONTROLLER, SIMPLE_UNIT = "ray::TransferQueueController", "ray::SimpleStorageUnit"
MOONCAKE_UNIT, MOONCAKE_MASTER = "ray::MooncakeStorageUnit", "/mooncake_master"
STORAGE_UNIT = {"simple": SIMPLE_UNIT, "mooncake_cpu": MOONCAKE_UNIT}


def storage_processes(*names: str) -> set[int]:
    """Pids below this process whose command line has one of the names."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it may end while we look
            if any(name in part for part in process.cmdline() for name in names):
                found.add(process.pid)
    return found
