"""A worker's samples of the present partition, and the columns that it is still writing.

    batch ◀── share with the replica ◀── fetch, by the leader or by every rank     columns not yet here
    write ──▶ storage, in the background ──▶ a failure is raised at the next ``batch``

Every worker of the world calls ``batch`` at the same points, since the call is collective.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import numpy as np
import torch
from torch import Tensor

from nemo_like.batch.columns import INPUT_IDS, RESPONSE_MASK, Column
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.data_plane.connection import reconnect
from nemo_like.data_plane.interface import ColumnData, DataPlane
from nemo_like.data_plane.operations import Operation
from nemo_like.data_plane.spec import DataPlaneSpec
from nemo_like.data_plane.storage_errors import DataPlaneError
from nemo_like.observability.trace import span
from nemo_like.policy.backends.interface import WORKER_TAGS
from nemo_like.policy.batch.policy_batch import PolicyBatch
from nemo_like.policy.options import ReplicaFetch
from nemo_like.policy.workers.replica import Replica

# The columns of a batch without samples.
_NO_TOKENS = {INPUT_IDS.name: np.zeros(0, np.int32), RESPONSE_MASK.name: np.zeros(0, np.uint8)}


class BatchKeeper:
    """Keeps one worker's samples from stage to stage, so that it fetches only the columns that are
    missing."""

    def __init__(
        self, plane: DataPlane | None, replica: Replica, fetching: ReplicaFetch, device: torch.device
    ) -> None:
        """Start without samples. ``plane`` is None for a worker that gets all columns from its leader."""
        self._plane, self._replica, self._device = plane, replica, device
        self._shares = fetching is ReplicaFetch.leader
        self._samples: tuple[object, ...] = ()  # which samples self._batch has
        self._batch: PolicyBatch | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="write")
        self._writing: Future[KVBatchMeta] | None = None

    def batch(self, meta: KVBatchMeta, columns: Sequence[Column]) -> PolicyBatch:
        """Return the samples of ``meta`` with at least ``columns``, and with the tags that ``meta`` has now.

        Only columns that this worker does not have are fetched. Waits for the present write. When any worker
        of the world failed to fetch or to write, every worker raises DataPlaneError: none has computed yet,
        and none is left waiting for another in a collective.

        A meta without samples gives an empty batch; it comes when all samples of the updates were
        accumulated.
        """
        samples = (*(chunk.key for chunk in meta.chunks), *meta.rows)
        if self._samples != samples:
            self._samples, self._batch = samples, None
        batch = self._batch
        missing = [column for column in columns if batch is None or column not in batch] if len(meta) else []
        values = {tag.name: list(map(float, meta.tag(tag))) for tag in WORKER_TAGS if meta.has_tag(tag)}
        with span("fetch"):
            fetched = self._fetched(meta, missing)
        if batch is None:
            needed = {name: fetched[name] for name in _NO_TOKENS} if len(meta) else _NO_TOKENS
            batch = PolicyBatch(needed, meta.lengths, values, self._device, meta.prompt_index)
        batch.add({column: fetched[column.name] for column in missing if column not in batch})
        batch.set_sample_values(values)
        self._batch = batch
        return batch

    def write(self, meta: KVBatchMeta, columns: Mapping[Column, Tensor]) -> None:
        """Write ``columns`` in the background; the next ``batch`` raises the error of a failed write.

        The caller must not change the tensors any more.
        """
        assert self._plane is not None
        arrays = {column.name: _read_only(values) for column, values in columns.items()}
        self._writing = self._writer.submit(self._write, self._plane, meta, arrays)

    def finish(self, partition: str) -> Sequence[Operation]:
        """Wait for the present write, forget the partition's samples, and return this worker's operations in
        the data plane since the last call. Raises DataPlaneError when this worker's write failed."""
        self._written()
        self._samples, self._batch = (), None
        if self._plane is None:
            return ()
        self._plane.forget(partition)
        return self._plane.take_operations()

    def abandon(self) -> None:
        """Abandon the step: forget its samples, wait until its write has ended or failed, and drop the record
        of its operations."""
        self._samples, self._batch = (), None
        with suppress(DataPlaneError):
            self._written()
        if self._plane is not None:
            self._plane.take_operations()

    def reconnect(self, spec: DataPlaneSpec) -> None:
        """Close the connection to the data plane and connect to the data plane of ``spec`` instead."""
        if self._plane is not None:
            self._plane = reconnect(self._plane, spec)

    def _fetched(self, meta: KVBatchMeta, columns: Sequence[Column]) -> dict[str, ColumnData]:
        """Return ``columns`` from the data plane or from the leader, the same on every worker of the
        replica."""
        fetched: dict[str, ColumnData] | None = None
        failure: DataPlaneError | None = None
        try:
            self._written()
            if columns and self._plane is not None:
                fetched = self._plane.fetch(meta, [column.name for column in columns])
        except DataPlaneError as error:
            failure = error
        self._replica.agree(failure)
        if columns and self._shares:
            return self._replica.share(columns, meta, fetched)
        return fetched or {}

    def _written(self) -> None:
        """Wait until the present write has ended; raise its error."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    @staticmethod
    def _write(plane: DataPlane, meta: KVBatchMeta, arrays: Mapping[str, np.ndarray]) -> KVBatchMeta:
        with span("write"):
            return plane.write(meta, arrays)


def _read_only(values: Tensor) -> np.ndarray:
    """Return the tensor's memory as a read-only array, which the data plane keeps without a copy."""
    array: np.ndarray = values.numpy()
    array.flags.writeable = False
    return array
