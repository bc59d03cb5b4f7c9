"""A worker of any group: it fetches samples, computes with its part of a model, and writes if it leads.

    GroupWorker           joins its group, and has its part of the model
      TrainingWorker      trains, saves and loads
        PolicyWorker      scores tokens, and sends its weights to the engines
        ValueWorker       values tokens, and estimates their advantages
      TeacherWorker       scores tokens by a frozen model

Workers are plain classes, so that a test can call them without Ray. Their methods that take a ``meta`` get
the shard of this data-parallel rank with its schedule; every rank of a replica gets the same shard. All ranks
compute; only the leader writes and returns results. Only the leader fetches, unless replica_fetch is
every_rank.
"""

from __future__ import annotations

import datetime
import time
from abc import ABC, abstractmethod
from pathlib import Path

import torch.distributed as dist

from nemo_like.batch.columns import Declaration
from nemo_like.batch.meta import KVBatchMeta, Schedule
from nemo_like.cluster.imports import load_target
from nemo_like.compat.gloo import one_gloo_device
from nemo_like.data_plane.connection import connect
from nemo_like.data_plane.spec import DataPlaneSpec
from nemo_like.models.remote_code import import_external_libs
from nemo_like.policy.backends.backend_kind import backend_kind_of
from nemo_like.policy.backends.interface import TrainingBackend, WorkerConnections
from nemo_like.policy.loss.objective import Objective
from nemo_like.policy.options import Device, ReplicaFetch, WorkerGroupConfig
from nemo_like.policy.workers.batch_keeper import BatchKeeper
from nemo_like.policy.workers.replica import Replica
from nemo_like.weight_transport.process_groups import Rendezvous, file_store, joined_store


class GroupWorker(ABC):
    """One worker of a group. ``version`` counts the training phases that its weights have seen."""

    def __init__(
        self,
        *,
        cfg: WorkerGroupConfig,
        objective: Objective,
        connections: WorkerConnections,
    ) -> None:
        """Keep the settings; ``cfg`` is the group's config group. ``setup`` loads the model and connects."""
        self.cfg, self.coordinates = cfg, connections.coordinates
        self.version = 0
        self._objective = objective
        self._connections = connections

    @abstractmethod
    def declarations(self) -> tuple[Declaration, ...]:
        """Return the columns that the group's phases write and read."""

    def setup(self) -> None:
        """Join the other workers, load the model and connect to the data plane; return when this worker is
        ready."""
        with one_gloo_device():
            self._join()
        source = self._connections.data_plane
        plane = None
        if self._fetches:
            plane = connect(source) if isinstance(source, DataPlaneSpec) else source
        self._batches = BatchKeeper(plane, self._replica, self.cfg.replica_fetch, self._backend.device)

    def settle(self) -> int | None:
        """Abandon the step and return the version of these weights.

        A worker's calls run one after the other, so its earlier calls have ended by now.
        """
        self._batches.abandon()
        return self.version

    def reconnect_data_plane(self, spec: DataPlaneSpec) -> None:
        """Close the connection to the data plane and connect to the data plane of ``spec`` instead."""
        self._batches.reconnect(spec)

    def stop(self) -> None:
        """Leave the other workers; safe to call twice."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _join(self) -> None:
        """Join the process groups of the world and build this worker's part of the model."""
        coordinates = self.coordinates
        if not dist.is_initialized():
            dist.init_process_group(
                "gloo" if self.cfg.device is Device.cpu else "nccl",
                store=self._store(),
                rank=coordinates.rank,
                world_size=coordinates.layout.world_size,
                timeout=datetime.timedelta(seconds=self._connections.timeout_s),
            )
        self._replica = Replica(coordinates, self._connections.timeout_s)
        self._backend = self._build_backend()

    def _store(self) -> dist.Store:
        """Return the store through which the workers of the group find each other."""
        place, timeout_s = self._connections.meeting_place, self._connections.timeout_s
        if isinstance(place, Path):
            return file_store(place, timeout_s)
        host, port = place
        if self.coordinates.rank == 0:
            return Rendezvous(host, timeout_s, port).store
        return joined_store(host, port, timeout_s)

    def _build_backend(self) -> TrainingBackend:
        kind = backend_kind_of(self.cfg)
        target = load_target(kind.backend, kind.imported_without)
        import_external_libs()
        backend: TrainingBackend = target(self.cfg, self._objective, self.coordinates)
        return backend

    @property
    def _fetches(self) -> bool:
        return self.coordinates.is_leader or self.cfg.replica_fetch is ReplicaFetch.every_rank


def schedule_of(meta: KVBatchMeta) -> Schedule:
    """Return the schedule of a shard. Raises ValueError when it has none."""
    if meta.schedule is None:
        raise ValueError(
            f"the batch of partition {meta.partition!r} has no schedule; shard it before dispatch"
        )
    return meta.schedule


class Stopwatch:
    """Measures the ``seconds`` spent inside the block."""

    def __enter__(self) -> Stopwatch:
        self._start = time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = time.perf_counter() - self._start
