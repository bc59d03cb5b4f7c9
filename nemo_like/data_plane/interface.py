"""The calls by which a stage uses the data plane.

``client`` and ``in_memory`` implement ``DataPlane``, and ``observed`` wraps it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from nemo_like.batch.meta import KVBatchMeta
from nemo_like.batch.tags import TagValue
from nemo_like.data_plane.operations import Operation

# A per_token column of N samples travels through this interface packed: one contiguous array
# [sum of lengths, *inner_shape], samples in the meta's order. A per_sample column is one array
# [N, *inner_shape]; a ragged or objects column is a sequence of N values. A column that is per_prompt has
# a value per chunk instead of per sample: put takes the values in the order of the chunks, and fetch returns
# them in the order of ``KVBatchMeta.prompt_index``.
ColumnData = np.ndarray | Sequence[Any]


class DataPlane(Protocol):
    """The data plane as one process uses it.

    Every call has a deadline, and raises ``DataPlaneError`` when it fails.
    """

    def put(
        self,
        partition: str,
        columns: Mapping[str, ColumnData],
        *,
        lengths: Sequence[int],
        chunk_sizes: Sequence[int],
        tags: Mapping[str, Sequence[TagValue]],
    ) -> KVBatchMeta:
        """Put N new samples into an open partition, and return their metadata.

        A chunk is the group of one prompt: the first ``chunk_sizes[0]`` samples, and so on; the sizes add up
        to N. ``lengths`` are tokens per sample. Nobody can read a sample before all are stored.
        """

    def write(self, meta: KVBatchMeta, columns: Mapping[str, ColumnData]) -> KVBatchMeta:
        """Write columns of samples that exist, and return ``meta`` with these columns.

        The samples may be any of a chunk; no column may be per_prompt. A second write of the same (sample,
        column) raises DuplicateWrite. This process keeps what it wrote: a read-only array itself, which must
        not change any more, and a copy of any other array.
        """

    def fetch(self, meta: KVBatchMeta, columns: Sequence[str]) -> dict[str, ColumnData]:
        """Return the named columns of the meta's samples, in the meta's order.

        Waits until other processes have written what is not there yet. What this process has fetched or
        written since the partition was opened is not transferred again. Arrays are read-only, since they may
        be the copy that this process keeps; torch tensors are copies.
        """

    def clear(self, meta: KVBatchMeta) -> None:
        """Clear these samples. The bytes of a segment are freed once none of its samples is left."""

    def forget(self, partition: str) -> None:
        """Forget the values that this process keeps of a partition; the storage keeps its own."""

    def take_operations(self) -> Sequence[Operation]:
        """Return the operations since the last call; none where ``data_plane.log_operations`` is off."""

    def close(self) -> None:
        """Disconnect this process; the storage stays up."""
