"""What a worker has of the partition under way: one batch of its samples, and what it still writes.

    batch ◀── fetch, by whoever fetches ── share with the replica     columns that are not there yet
    write ──▶ storage, in the background ──▶ known at the next ``batch``

Every worker of the world makes the same calls.
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
from nemo_like.config.schema import ReplicaFetch
from nemo_like.data_plane.connection import reconnected
from nemo_like.data_plane.interface import ColumnData, DataPlane
from nemo_like.data_plane.operations import Operation
from nemo_like.data_plane.spec import DataPlaneSpec
from nemo_like.data_plane.storage_errors import DataPlaneError
from nemo_like.observability.trace import span
from nemo_like.policy.batch import PolicyBatch
from nemo_like.policy.interface import WORKER_TAGS
from nemo_like.policy.replica import Replica


class BatchKeeper:
    """One worker's samples, which its stages share."""

    def __init__(
        self, plane: DataPlane | None, replica: Replica, fetching: ReplicaFetch, device: torch.device
    ) -> None:
        """``plane`` is None for a worker that gets everything from its leader."""
        self._plane, self._replica, self._device = plane, replica, device
        self._shares = fetching is ReplicaFetch.leader
        self._samples: tuple[object, ...] = ()  # of the batch that is kept
        self._batch: PolicyBatch | None = None
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="write")
        self._writing: Future[KVBatchMeta] | None = None

    def batch(self, meta: KVBatchMeta, columns: Sequence[Column]) -> PolicyBatch:
        """The samples of the meta with these columns at least, and with the tags as the meta has them now.

        Raises DataPlaneError on every worker of the world when any could not fetch, or could not write what
        it began to: nobody has computed then, and nobody waits for another in a collective.
        """
        samples = (*(chunk.key for chunk in meta.chunks), *meta.rows)
        if self._samples != samples:
            self._samples, self._batch = samples, None
        batch = self._batch
        missing = [column for column in columns if batch is None or column not in batch]
        values = {tag.name: list(map(float, meta.tag(tag))) for tag in WORKER_TAGS if meta.has_tag(tag)}
        with span("fetch"):
            fetched = self._fetched(meta, missing)
        if batch is None:
            needed = {name: fetched[name] for name in (INPUT_IDS.name, RESPONSE_MASK.name)}
            batch = PolicyBatch(needed, meta.lengths, values, self._device, meta.prompt_index)
        batch.add({column: fetched[column.name] for column in missing if column not in batch})
        batch.set_sample_values(values)
        self._batch = batch
        return batch

    def write(self, meta: KVBatchMeta, columns: Mapping[Column, Tensor]) -> None:
        """Have columns stored, which nobody changes any more; whether that went well shows at the next
        ``batch``."""
        assert self._plane is not None
        arrays = {column.name: _read_only(values) for column, values in columns.items()}
        self._writing = self._writer.submit(self._write, self._plane, meta, arrays)

    def finish(self, partition: str) -> Sequence[Operation]:
        """Nothing more is wanted of the partition; what was done in the data plane."""
        self._samples, self._batch = (), None
        if self._plane is None:
            return ()
        self._plane.forget(partition)
        return self._plane.take_operations()

    def abandon(self) -> None:
        """The step was given up; returns once nothing of it is under way."""
        self._samples, self._batch = (), None
        with suppress(DataPlaneError):
            self._written()
        if self._plane is not None:
            self._plane.take_operations()

    def reconnect(self, spec: DataPlaneSpec) -> None:
        """Fetch and write there from now on."""
        if self._plane is not None:
            self._plane = reconnected(self._plane, spec)

    def _fetched(self, meta: KVBatchMeta, columns: Sequence[Column]) -> dict[str, ColumnData]:
        """From the data plane, or from the leader: every worker of the replica gets the same."""
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
        """Wait for what is being written; raises what went wrong."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    @staticmethod
    def _write(plane: DataPlane, meta: KVBatchMeta, arrays: Mapping[str, np.ndarray]) -> KVBatchMeta:
        with span("write"):
            return plane.write(meta, arrays)


def _read_only(values: Tensor) -> np.ndarray:
    """The values of a tensor that nobody changes any more: the data plane keeps them without a copy."""
    array: np.ndarray = values.numpy()
    array.flags.writeable = False
    return array
