"""A worker of a group that trains its model: the part that policy and critic share."""

from __future__ import annotations

import datetime
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from nemo_like.batch.columns import Column
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.batch.tags import GROUP_ID
from nemo_like.checkpoint.digests import differing_files, share_of_rank
from nemo_like.checkpoint.options import CheckpointWriting, ResumeParts
from nemo_like.cluster.breakdown import breaking_down
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.data_plane.operations import Operation
from nemo_like.observability.trace import span
from nemo_like.policy.batch.policy_batch import PolicyBatch
from nemo_like.policy.groups.results import WorkerUpdate
from nemo_like.policy.loss.checked_loss import LossFailed
from nemo_like.policy.options import TrainedGroupConfig
from nemo_like.policy.workers.checkpoint_writer import CheckpointWriter, shortened_errors
from nemo_like.policy.workers.group_worker import GroupWorker, Stopwatch, schedule_of
from nemo_like.policy.workers.random_state import load_random_state, save_random_state
from nemo_like.policy.workers.saved_digests import read_digests, write_digests
from nemo_like.policy.workers.stored_weights import check_stored
from nemo_like.policy.workers.worker_watch import WorkerWatch


class TrainingWorker(GroupWorker):
    """One worker of a group that trains."""

    cfg: TrainedGroupConfig
    _is_updating = False
    _watch: WorkerWatch | None = None
    _checkpoint: CheckpointWriter | None = None  # of the latest checkpoint
    _saved: tuple[Path, dict[str, Tensor]] | None = None  # where it is, and some of the weights that it has

    @abstractmethod
    def training_reads(self) -> Sequence[Column]:
        """Return the columns that ``train`` fetches."""

    @breaking_down()
    def train(self, meta: KVBatchMeta) -> WorkerUpdate | None:
        """Make the schedule's optimizer updates, and count the version up by one. The leader returns the
        result, the other ranks None.

        The first update may have no micro-batches; it then uses the gradients that were accumulated. Raises
        DataPlaneError before any weight is changed, when samples cannot be fetched or when the background
        write of the previous phase failed, on this worker or on another.
        """
        batch = self._batches.batch(meta, self.training_reads())
        if self._watch is not None:
            self._watch.training(meta, batch)
        self._before_training(batch)
        self._is_updating = True
        with span("compute"), Stopwatch() as compute, naming_samples(meta):
            metrics = self._backend.train(batch, schedule_of(meta))
        self.version += 1
        self._after_training()
        self._is_updating = False
        measured, named = ({}, ()) if self._watch is None else self._watch.trained()
        operations = self._batches.finish(meta.partition)
        if not self.coordinates.is_leader:
            return None
        return WorkerUpdate(metrics, self.version, compute.seconds, operations, measured, named)

    def _before_training(self, batch: PolicyBatch) -> None:
        """Add to ``batch`` what the workers compute together before its first update; every rank calls
        it."""

    def _after_training(self) -> None:
        """Change what follows from the updates of ``train``; every rank calls it."""

    @breaking_down()
    def skip(self, partition: str) -> Sequence[Operation]:
        """End a step without training: wait for the present write and forget the step's samples.

        The leader returns its operations in the data plane. Raises DataPlaneError when this worker's write
        failed.
        """
        operations = self._batches.finish(partition)
        return operations if self.coordinates.is_leader else ()

    def settle(self) -> int | None:
        """Abandon the step and the accumulated gradients; return the version of these weights, or None when
        an update broke off.

        A worker's calls run one after the other, so its earlier calls have ended by now.
        """
        version = super().settle()
        self._backend.drop_accumulated()
        if self._watch is not None:
            self._watch.abandon()
        return None if self._is_updating else version

    def save_checkpoint(self, path: str, writing: CheckpointWriting) -> None:
        """Write the state from which training can continue into the empty directory ``path``; every rank
        calls it.

        No rank may still be writing the previous checkpoint. With background writing this returns once the
        state is copied, and the files are written afterwards.
        """
        self._checkpoint = CheckpointWriter(self._checkpoint_group, writing)
        self._backend.save_checkpoint(Path(path), self._checkpoint)
        random_state = _random_state_path(path, self.coordinates)
        save_random_state(random_state, self._backend.device, self._backend.random_states())
        if self._watch is not None:
            write_digests(Path(path), self.coordinates, self._backend.state_digests())
            self._saved = Path(path), self._backend.vectors()
        self._checkpoint.complete(Path(path))

    def has_written_checkpoint(self) -> bool:
        """Return whether this rank's part of the latest checkpoint is on disk; raise the error of a failed
        write."""
        return self._checkpoint is None or self._checkpoint.is_done()

    def wait_for_checkpoint(self) -> dict[str, str]:
        """Wait until this rank's part of the latest checkpoint is on disk; return the SHA-256 of its share of
        the files, by name. Raises the error of a failed write, and the error of ``check_stored``."""
        if self._checkpoint is None:
            return {}
        digests, saved = self._checkpoint.wait(self._connections.timeout_s), self._saved
        self._saved = None
        if saved is not None:
            check_stored(*saved)
        return digests

    def corrupt_checkpoint_files(self, path: str, digests: Mapping[str, str]) -> list[str]:
        """Hash this rank's share of a checkpoint's files; return the names of files that differ from
        ``digests``."""
        share = share_of_rank(digests, self.coordinates.rank, self.coordinates.layout.world_size)
        return differing_files(Path(path), {name: digests[name] for name in share})

    def load_checkpoint(self, path: str, version: int, parts: ResumeParts = ResumeParts.all) -> None:
        """Take these parts of a checkpoint, which another layout may have written; every rank calls it."""
        with shortened_errors():
            self._backend.load_checkpoint(Path(path), parts)
        if self._watch is not None:
            self._watch.abandon()
            self._watch.forget_weights()
            self._watch.reference_has_come(is_new=self._backend.has_new_reference)
            if parts is ResumeParts.all and (saved := read_digests(Path(path), self.coordinates)):
                self._watch.compare_saved(saved, self._backend.state_digests())
        self.version = version
        random_state = _random_state_path(path, self.coordinates)
        if parts is ResumeParts.all and random_state.is_file():
            self._backend.set_random_states(load_random_state(random_state, self._backend.device))

    def _join(self) -> None:
        """Join the process groups of the world and one for checkpoints, and build this worker's part of the
        model."""
        super()._join()
        self._checkpoint_group = dist.new_group(
            backend="gloo", timeout=datetime.timedelta(seconds=self._connections.timeout_s)
        )


@contextmanager
def naming_samples(meta: KVBatchMeta) -> Iterator[None]:
    """Add the step to the message of a LossFailed, and the sample if one is to blame."""
    try:
        yield
    except LossFailed as error:
        sample = ""
        if error.row is not None:
            group, (_, number) = meta.tag(GROUP_ID)[error.row], meta.rows[error.row]
            sample = f", sample {number} of prompt {group}"
        raise LossFailed(f"{meta.occasion}{sample}: {error}", error.row) from error


def _random_state_path(path: str, coordinates: Coordinates) -> Path:
    """Return the file of a rank's random state. Its name holds the number of ranks, since another number of
    ranks cannot continue it."""
    return Path(path) / f"random_state_{coordinates.rank}_of_{coordinates.layout.world_size}.pt"
