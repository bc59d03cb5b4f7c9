"""A worker of any group that trains a model: it fetches samples, computes with its part of the model, and
writes back if it leads.

    TrainingWorker      joins its group, trains, saves and loads
      PolicyWorker      scores tokens, and sends its weights to the engines
      ValueWorker       values tokens, and estimates their advantages
      TeacherWorker     scores tokens by a frozen model: it never trains

Workers are plain classes, so that a test can call them without Ray. Their methods that take a ``meta`` get
the shard of this data-parallel rank with its schedule; every rank of a replica gets the same shard. All ranks
compute; only the leader writes and returns results. Only the leader fetches, unless replica_fetch is
every_rank.
"""

from __future__ import annotations

import datetime
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist

from nemo_like.batch.columns import Column, Declaration
from nemo_like.batch.meta import KVBatchMeta, Schedule
from nemo_like.batch.tags import GROUP_ID
from nemo_like.checkpoint.digests import differing_files, own_share
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.cluster.gloo import one_gloo_device
from nemo_like.cluster.imports import lasting_imports
from nemo_like.config.schema import CheckpointWriting, Device, PolicyBackend, PolicyConfig, ReplicaFetch
from nemo_like.data_plane.connection import connect
from nemo_like.data_plane.interface import DataPlane
from nemo_like.data_plane.operations import Operation
from nemo_like.data_plane.spec import DataPlaneSpec
from nemo_like.observability.metrics import Metric
from nemo_like.observability.trace import span
from nemo_like.policy.batch_keeper import BatchKeeper
from nemo_like.policy.checked_loss import LossFailed
from nemo_like.policy.checkpoint_writer import CheckpointWriter, told_in_short
from nemo_like.policy.interface import TrainingBackend
from nemo_like.policy.objective import Objective
from nemo_like.policy.random_state import load_random_state, save_random_state
from nemo_like.policy.replica import Replica
from nemo_like.policy.results import WorkerUpdate
from nemo_like.policy.worker_watch import WorkerWatch


class TrainingWorker(ABC):
    """One worker of a group. ``version`` counts the training phases that its weights have seen."""

    def __init__(
        self,
        *,
        cfg: PolicyConfig,
        objective: Objective,
        coordinates: Coordinates,
        data_plane: DataPlane | DataPlaneSpec,
        master_addr: str,
        master_port: int,
        timeout_s: float,
    ) -> None:
        """Keep the settings; ``setup`` loads the model and connects.

        ``cfg`` is that of the worker's group, and ``timeout_s`` bounds every collective. The workers of the
        group meet at ``master_addr`` and ``master_port``.
        """
        self.cfg, self.coordinates = cfg, coordinates
        self.version = 0
        self._objective = objective
        self._is_updating = False
        self._data_plane_source = data_plane
        self._init_method = f"tcp://{master_addr}:{master_port}"
        self._timeout_s = timeout_s
        self._watch: WorkerWatch | None = None

    @abstractmethod
    def declarations(self) -> tuple[Declaration, ...]:
        """Return the columns that the group's phases write and read."""

    @abstractmethod
    def training_reads(self) -> Sequence[Column]:
        """Return the columns that ``train`` fetches."""

    def setup(self) -> None:
        """Join the other workers, load the model and connect to the data plane; return when this worker is
        ready."""
        with one_gloo_device():
            self._join()
        self._checkpoint: CheckpointWriter | None = None
        source = self._data_plane_source
        plane = None
        if self._fetches:
            plane = connect(source) if isinstance(source, DataPlaneSpec) else source
        self._batches = BatchKeeper(plane, self._replica, self.cfg.replica_fetch, self._backend.device)

    def train(self, meta: KVBatchMeta) -> WorkerUpdate | None:
        """Make the schedule's optimizer updates, and count the version up by one. The leader returns the
        result, the other ranks None.

        An update without micro-batches, which the first may be, takes the gradients that were accumulated.
        Raises DataPlaneError before any weight is changed, when samples cannot be fetched or when the
        background write of the phase before failed, on this worker or on another.
        """
        batch = self._batches.batch(meta, self.training_reads())
        watch, losses = self._watch, None
        if watch is not None:
            losses = watch.training(meta, batch)
        self._is_updating = True
        with span("compute"), Stopwatch() as compute, naming_samples(meta):
            metrics = self._backend.train(batch, schedule_of(meta), losses)
        self.version += 1
        self._is_updating = False
        measured: dict[str, Metric] = {}
        if watch is not None and losses is not None:
            measured = watch.trained(losses)
        operations = self._batches.finish(meta.partition)
        if not self.coordinates.is_leader:
            return None
        return WorkerUpdate(metrics, self.version, compute.seconds, operations, measured)

    def skip(self, partition: str) -> Sequence[Operation]:
        """End a step without training: wait for the write under way and forget the step's samples. The leader
        returns what it did in the data plane. Raises DataPlaneError when this worker's write failed."""
        operations = self._batches.finish(partition)
        return operations if self.coordinates.is_leader else ()

    def settle(self) -> int | None:
        """Abandon the step and return the version of these weights, None when an update broke off.

        Calls of a worker run one after the other, so this one waits until those before it have ended.
        """
        self._batches.abandon()
        self._backend.drop_accumulated()
        if self._watch is not None:
            self._watch.abandon()
        return None if self._is_updating else self.version

    def reconnect_data_plane(self, spec: DataPlaneSpec) -> None:
        """Close the connection to the data plane and use that of ``spec`` from now on."""
        self._batches.reconnect(spec)

    def save_checkpoint(self, path: str, writing: CheckpointWriting) -> None:
        """Write what training continues from into the empty directory ``path``; every rank calls it.

        No rank may still be writing the previous checkpoint. With background writing this returns once the
        state is copied, and the files are written afterwards.
        """
        self._checkpoint = CheckpointWriter(self._checkpoint_group, writing)
        self._backend.save_checkpoint(Path(path), self._checkpoint)
        random_state = _random_state_path(path, self.coordinates)
        save_random_state(random_state, self._backend.device, self._backend.random_states())
        self._checkpoint.complete(Path(path))

    def has_written_checkpoint(self) -> bool:
        """Return whether this rank's part of the latest checkpoint is on disk; raise what went wrong."""
        return self._checkpoint is None or self._checkpoint.is_done()

    def wait_for_checkpoint(self) -> dict[str, str]:
        """Wait until this rank's part of the latest checkpoint is on disk; return the SHA-256 of its share of
        the files, by name. Raises what went wrong."""
        return {} if self._checkpoint is None else self._checkpoint.wait(self._timeout_s)

    def corrupt_checkpoint_files(self, path: str, digests: Mapping[str, str]) -> list[str]:
        """Hash this rank's share of a checkpoint's files; return the names of those that differ from
        ``digests``."""
        share = own_share(digests, self.coordinates.rank, self.coordinates.layout.world_size)
        return differing_files(Path(path), {name: digests[name] for name in share})

    def load_checkpoint(self, path: str, version: int) -> None:
        """Continue from a checkpoint, which another layout may have written; every rank calls it."""
        with told_in_short():
            self._backend.load_checkpoint(Path(path))
        if self._watch is not None:
            self._watch.abandon()
            self._watch.forget_weights()
        self.version = version
        random_state = _random_state_path(path, self.coordinates)
        if random_state.is_file():
            self._backend.set_random_states(load_random_state(random_state, self._backend.device))

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
                init_method=self._init_method,
                rank=coordinates.rank,
                world_size=coordinates.layout.world_size,
                timeout=datetime.timedelta(seconds=self._timeout_s),
            )
        self._replica = Replica(coordinates, self._timeout_s)
        self._checkpoint_group = dist.new_group(
            backend="gloo", timeout=datetime.timedelta(seconds=self._timeout_s)
        )
        self._backend = self._build_backend()

    def _build_backend(self) -> TrainingBackend:
        # Each backend takes seconds to import, so only the one that is used is loaded.
        if self.cfg.backend is PolicyBackend.fsdp:
            with lasting_imports():
                from nemo_like.policy.fsdp.backend import FSDPBackend

            return FSDPBackend(self.cfg, self._objective, self.coordinates)
        # Megatron-core loads W&B, which takes half a second, for logs of its own.
        with lasting_imports(without=["wandb"]):
            from nemo_like.policy.megatron.backend import MegatronBackend

        return MegatronBackend(self.cfg, self._objective, self.coordinates)

    @property
    def _fetches(self) -> bool:
        return self.coordinates.is_leader or self.cfg.replica_fetch is ReplicaFetch.every_rank


@contextmanager
def naming_samples(meta: KVBatchMeta) -> Iterator[None]:
    """Add the step to what a loss raises, and the sample where one is to blame."""
    try:
        yield
    except LossFailed as error:
        sample = ""
        if error.row is not None:
            group, (_, number) = meta.tag(GROUP_ID)[error.row], meta.rows[error.row]
            sample = f", sample {number} of prompt {group}"
        raise LossFailed(f"{meta.occasion}{sample}: {error}", error.row) from error


def _random_state_path(path: str, coordinates: Coordinates) -> Path:
    """Return the file of a rank's random state. Its name holds the world's size, since a world of another
    size cannot continue it."""
    return Path(path) / f"random_state_{coordinates.rank}_of_{coordinates.layout.world_size}.pt"


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
