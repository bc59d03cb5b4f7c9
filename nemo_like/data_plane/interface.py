"""What a stage may do with the data plane. Implementations: ``transfer_queue`` and ``in_memory``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from nemo_like.batch.columns import Column
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.batch.tags import TagValue
from nemo_like.data_plane.operations import Operation

# A per_token column of N samples travels through this interface packed: one contiguous array
# [sum of lengths, *inner_shape], samples in the meta's order. A per_sample column is one array
# [N, *inner_shape]; ragged and objects columns are a sequence of N values. Where it is per_prompt, it has a
# value per chunk instead of per sample: put takes them in the order of the chunks, fetch gives them in the
# order of ``KVBatchMeta.prompt_index``.
ColumnData = np.ndarray | Sequence[Any]


class DataPlane(Protocol):
    """Client of one process. All calls have a deadline and raise ``DataPlaneError`` with what is missing."""

    def put(
        self,
        partition: str,
        columns: Mapping[str, ColumnData],
        *,
        lengths: Sequence[int],
        chunk_sizes: Sequence[int],
        tags: Mapping[str, Sequence[TagValue]],
    ) -> KVBatchMeta:
        """First write of N new samples into an open partition; sum(chunk_sizes) = N, consecutive rows. A
        chunk is the group of one prompt."""

    def write(self, meta: KVBatchMeta, columns: Mapping[str, ColumnData]) -> KVBatchMeta:
        """Add columns to samples that exist, none of them per_prompt; any subset of a chunk's rows. A second
        write of the same (sample, column) raises. An array that is read-only is kept as it is, and must not
        change any more; of another a copy is kept."""

    def fetch(self, meta: KVBatchMeta, columns: Sequence[str]) -> dict[str, ColumnData]:
        """The named columns of the meta's samples, in the meta's order. What this process fetched or
        wrote earlier in the partition's life is not transferred again. Waits for columns that others
        still have to write. Arrays are read-only: they may be the copy that this process keeps."""

    def clear(self, meta: KVBatchMeta) -> None:
        """Drop these samples. The bytes of a chunk are freed once none of its samples is left."""

    def forget(self, partition: str) -> None:
        """Release what this process keeps of a partition (its local copies only)."""

    def take_operations(self) -> Sequence[Operation]:
        """What this client did since the last time it was asked; nothing where nobody observes it."""

    def close(self) -> None:
        """Disconnect this process; the storage lives on."""


class DataPlaneControl(Protocol):
    """Life of partitions; served by the process that owns the storage."""

    def open_partition(self, name: str, columns: Sequence[Column], num_readers: int | None = None) -> None:
        """Register a partition and its columns before anyone writes. Waits while as many partitions as
        there may be are open; raises TooManyPartitions at the deadline.

        Where all samples of a put will be divided by ``sharding`` among ``num_readers`` ranks, each rank's
        samples are stored together. None: nobody knows, as when some of them will be dropped."""

    def close_partition(self, name: str) -> None:
        """Drop a partition and everything in it; safe when it is already gone."""
