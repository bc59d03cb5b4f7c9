"""A data plane within one process: the same client over a dictionary, for tests and Ray-free workers."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence

import numpy as np

from nemo_like.data_plane.capacity import Capacity
from nemo_like.data_plane.client import PackedDataPlane, Stored
from nemo_like.data_plane.columns import Column
from nemo_like.data_plane.errors import StorageFailed
from nemo_like.data_plane.registry import Registry
from nemo_like.data_plane.segments import (
    Commit,
    PartitionInfo,
    Replaced,
    Replacement,
    Rows,
    Segment,
    Thinned,
    Want,
)


class InMemoryStorage:
    """What the clients of one process share: a registry and the values."""

    def __init__(self, capacity_bytes: int | None = None, max_open_partitions: int | None = None) -> None:
        self._registry = Registry("in-memory", Capacity(capacity_bytes), max_open_partitions)
        self._changed = threading.Condition()
        self._values: dict[
            tuple[str, str], dict[str, np.ndarray]
        ] = {}  # (storage id, key) -> column -> array
        self.num_clients = 0

    @property
    def num_bytes(self) -> int:
        """Bytes held in all partitions."""
        with self._changed:
            return sum(array.nbytes for columns in self._values.values() for array in columns.values())

    def open_partition(
        self, name: str, columns: Sequence[Column], timeout_s: float, num_readers: int | None = None
    ) -> None:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self._registry.open(name, columns, num_readers):
                if not self._changed.wait(deadline - time.monotonic()):
                    raise self._registry.too_many(name, timeout_s)

    def close_partition(self, name: str) -> None:
        with self._changed:
            storage_id = self._registry.close(name)
            self._values = {key: value for key, value in self._values.items() if key[0] != storage_id}
            if storage_id is not None:
                self._registry.capacity.release_partition(storage_id)
            self._changed.notify_all()

    def describe(self, name: str, timeout_s: float) -> PartitionInfo:
        with self._changed:
            return self._registry.describe(name)

    def find(self, name: str, wants: Sequence[Want], timeout_s: float) -> tuple[PartitionInfo, list[Segment]]:
        info = self.describe(name, timeout_s)
        return info, self.locate(info, wants, timeout_s)

    def reserve(self, info: PartitionInfo, sizes: Mapping[str, int], timeout_s: float) -> None:
        with self._changed:
            self._registry.reserve(info.name, info.storage_id, sizes)

    def release(self, info: PartitionInfo, keys: Sequence[str], timeout_s: float) -> None:
        with self._changed:
            self._registry.capacity.release(info.storage_id, keys)

    def commit(self, info: PartitionInfo, commit: Commit, timeout_s: float) -> None:
        with self._changed:
            self._registry.commit(info.name, info.storage_id, commit)
            self._changed.notify_all()

    def locate(self, info: PartitionInfo, wants: Sequence[Want], timeout_s: float) -> list[Segment]:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while (found := self._registry.locate(info.name, info.storage_id, wants)) is None:
                if not self._changed.wait(deadline - time.monotonic()):
                    raise self._registry.missing(info.name, info.storage_id, wants, timeout_s)
            return found

    def clear(self, info: PartitionInfo, rows: Rows, timeout_s: float) -> Sequence[Thinned]:
        with self._changed:
            return self._freed(info, self._registry.clear(info.name, info.storage_id, rows))

    def replace(
        self, info: PartitionInfo, replacements: Sequence[Replacement], timeout_s: float
    ) -> Sequence[Thinned]:
        with self._changed:
            return self._freed(info, self._registry.replace(info.name, info.storage_id, replacements))

    def _freed(self, info: PartitionInfo, replaced: Replaced) -> Sequence[Thinned]:
        keys = [segment.key for segment in replaced.obsolete]
        for key in keys:
            del self._values[info.storage_id, key]
        self._registry.capacity.release(info.storage_id, keys)
        return replaced.thinned

    def save(
        self, info: PartitionInfo, keys: Sequence[str], values: Stored, timeout_s: float
    ) -> Sequence[None]:
        with self._changed:
            for index, key in enumerate(keys):
                self._values[info.storage_id, key] = {
                    name: arrays[index].copy() for name, arrays in values.items()
                }
        return [None] * len(keys)

    def load(
        self, info: PartitionInfo, segments: Sequence[Segment], columns: Sequence[str], timeout_s: float
    ) -> Stored:
        keys = [segment.key for segment in segments]
        with self._changed:
            absent = [key for key in keys if (info.storage_id, key) not in self._values]
            if absent:
                raise StorageFailed(f"partition {info.name!r}: segments {absent} are not in storage")
            return {name: [self._values[info.storage_id, key][name] for key in keys] for name in columns}

    def discard(self, info: PartitionInfo, segments: Sequence[Segment], timeout_s: float) -> None:
        with self._changed:
            for segment in segments:
                self._values.pop((info.storage_id, segment.key), None)


class InMemoryDataPlane(PackedDataPlane):
    """``DataPlane`` and ``DataPlaneControl`` in one; several clients may share one storage."""

    def __init__(self, storage: InMemoryStorage | None = None, *, timeout_s: float = 5.0) -> None:
        self.storage = storage or InMemoryStorage()
        self.storage.num_clients += 1
        client_id = str(self.storage.num_clients)
        writer = f"client {client_id} of process {os.getpid()}"
        super().__init__(self.storage, self.storage, client_id=client_id, writer=writer, timeout_s=timeout_s)

    def open_partition(self, name: str, columns: Sequence[Column], num_readers: int | None = None) -> None:
        """Register a partition and its columns before anyone writes. Waits while as many partitions as
        there may be are open; raises TooManyPartitions at the deadline."""
        self.storage.open_partition(name, columns, self._timeout_s, num_readers)

    def close_partition(self, name: str) -> None:
        """Drop a partition and everything in it; safe when it is already gone."""
        self.storage.close_partition(name)
