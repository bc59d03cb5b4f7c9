"""Wrappers that record what a data plane does; used only with ``data_plane.log_operations``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_like.batch.meta import KVBatchMeta
from nemo_like.batch.tags import TagValue
from nemo_like.data_plane.client import DataPlaneClient, Loaded, Store, Stored
from nemo_like.data_plane.interface import ColumnData
from nemo_like.data_plane.operations import Operation, OperationLog
from nemo_like.data_plane.segments import Segment


class ObservedStore:
    """A ``Store`` that counts in ``log`` the bytes which move, by column."""

    def __init__(self, store: Store, log: OperationLog) -> None:
        self._store, self._log = store, log

    def save(self, segments: Sequence[Segment], values: Stored, timeout_s: float) -> Any:
        write = self._store.save(segments, values, timeout_s)
        for column, arrays in values.items():
            self._log.moved(column, sum(array.nbytes for array in arrays))
        return write

    def load(self, segments: Sequence[Segment], timeout_s: float) -> Sequence[Loaded]:
        loaded = self._store.load(segments, timeout_s)
        for values in loaded:
            for column, array in values.items():
                self._log.moved(column, array.nbytes)
        return loaded

    def close(self) -> None:
        self._store.close()


class ObservedDataPlane:
    """A ``DataPlane`` that records its operations in ``log``, where the store of ``plane`` counts its
    bytes."""

    def __init__(self, plane: DataPlaneClient, log: OperationLog) -> None:
        self._plane, self._log = plane, log

    def put(
        self,
        partition: str,
        columns: Mapping[str, ColumnData],
        *,
        lengths: Sequence[int],
        chunk_sizes: Sequence[int],
        tags: Mapping[str, Sequence[TagValue]],
    ) -> KVBatchMeta:
        with self._log.operation("put", columns):
            return self._plane.put(partition, columns, lengths=lengths, chunk_sizes=chunk_sizes, tags=tags)

    def write(self, meta: KVBatchMeta, columns: Mapping[str, ColumnData]) -> KVBatchMeta:
        with self._log.operation("write", columns):
            return self._plane.write(meta, columns)

    def fetch(self, meta: KVBatchMeta, columns: Sequence[str]) -> dict[str, ColumnData]:
        with self._log.operation("fetch", columns):
            return self._plane.fetch(meta, columns)

    def clear(self, meta: KVBatchMeta) -> None:
        with self._log.operation("clear"):
            self._plane.clear(meta)

    def forget(self, partition: str) -> None:
        self._plane.forget(partition)

    def take_operations(self) -> tuple[Operation, ...]:
        return self._log.take()

    def close(self) -> None:
        self._plane.close()
