"""A TransferQueue of one's own on the test session's Ray, and clients in this and in other processes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import replace

import psutil
import ray

from nemo_like.cluster.actors import ActorHandle, ActorSpec, start_actor
from nemo_like.config.schema import DataPlaneConfig, StorageBackend
from nemo_like.data_plane.columns import Column
from nemo_like.data_plane.factory import DataPlaneSpec, connect, host_actor
from nemo_like.data_plane.interface import DataPlane
from nemo_like.data_plane.meta import KVBatchMeta

START_TIMEOUT_S = 90.0


class TransferQueuePlanes:
    """One run: its host, two clients in this process (each with a cache of its own), control."""

    def __init__(self, run_id: str, *, timeout_s: float, num_units: int = 1) -> None:
        self.timeout_s = timeout_s
        cfg = DataPlaneConfig(
            storage_backend=StorageBackend.simple, num_storage_units=num_units, timeout_s=timeout_s
        )
        spec = host_actor(cfg, run_id=run_id, start_timeout_s=START_TIMEOUT_S)
        # Runs of one driver share its names.
        self.host: ActorHandle = start_actor(replace(spec, name=f"data_plane-{run_id}"))
        self.spec = DataPlaneSpec(host=self.host, timeout_s=timeout_s, start_timeout_s=START_TIMEOUT_S)
        self._clients: list[DataPlane] = []

    def start(self) -> None:
        self.call("ready", deadline_s=START_TIMEOUT_S)

    def client(self) -> DataPlane:
        return self._connected(0)

    def other_client(self) -> DataPlane:
        return self._connected(1)

    def open(self, name: str, columns: Sequence[Column]) -> None:
        self.call("open_partition", name, tuple(columns))

    def close(self, name: str) -> None:
        self.call("close_partition", name)

    def num_stored_keys(self) -> int:
        """As TransferQueue itself counts them."""
        session = self.client()._session
        partitions = session.start(session._client.async_kv_list()).result(self.timeout_s)
        return sum(len(keys) for keys in partitions.values())

    def call(self, method: str, *args: object, deadline_s: float | None = None) -> object:
        try:
            return self.host.submit(method, *args).result(deadline_s or self.timeout_s + 10)
        except ray.exceptions.RayTaskError as error:
            raise error.cause from None

    def stop(self) -> None:
        for client in self._clients:
            client.close()
        self.call("shutdown")
        self.host.kill()

    def _connected(self, number: int) -> DataPlane:
        while len(self._clients) <= number:
            self._clients.append(connect(self.spec))
        return self._clients[number]


class RemoteReader:
    """A client in a process of its own; the target of an actor."""

    def __init__(self, spec: DataPlaneSpec) -> None:
        self._plane = connect(spec)

    def fetch(self, meta: KVBatchMeta, columns: Sequence[str]) -> dict[str, object]:
        return dict(self._plane.fetch(meta, columns))

    def disconnect(self) -> None:
        self._plane.close()

    def pid(self) -> int:
        return os.getpid()


def remote_reader(spec: DataPlaneSpec) -> ActorHandle:
    target = "tests.functional.data_plane_fixtures:RemoteReader"
    return start_actor(ActorSpec("reader", target, kwargs={"spec": spec}))


def ray_processes(name: str) -> set[int]:
    """Pids of this Ray's actors of a class, by what Ray writes into their command line."""
    found = set()
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it may end while we look
            if any(f"ray::{name}" in part for part in process.cmdline()):
                found.add(process.pid)
    return found
