"""The data-plane client of one process, over any storage.

    put / write    check ─▶ cut into segments ─▶ reserve ─▶ save the bytes ─▶ commit: now they are readable
    fetch          cache? ─▶ locate (waits for the writers) ─▶ load the bytes ─▶ check ─▶ cache ─▶ gather

Nothing can be read before its commit, so a writer that dies half-way leaves no half-written sample.
The host's catalogue says which segment holds which values, and a ``Store`` moves their bytes. This module
and the catalogue check all values that are written or loaded, in the same way for every storage.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import numpy as np

from nemo_like.batch.meta import Chunk, KVBatchMeta
from nemo_like.batch.tags import TagValue
from nemo_like.data_plane import codec, cutting
from nemo_like.data_plane.cache import Extent, PartitionCache, all_rows, extents
from nemo_like.data_plane.interface import ColumnData
from nemo_like.data_plane.operations import Operation
from nemo_like.data_plane.segments import Commit, PartitionInfo, Segment, Want, with_write
from nemo_like.data_plane.storage_errors import CorruptData, DataPlaneError, StorageFailed, UnknownPartition

Stored = Mapping[str, Sequence[np.ndarray]]  # column -> one array per segment
Loaded = Mapping[str, np.ndarray]  # a segment's values by column
_T = TypeVar("_T")


class Host(Protocol):
    """This process's access to the ``DataPlaneHost``."""

    def ask(self, method: str, partition: str, timeout_s: float, *args: Any) -> Any:
        """Call a method of the host and return its answer; ``partition`` is named in errors.

        Raises the method's own error, StorageFailed when the host is gone, and DeadlineExceeded.
        """


class Store(Protocol):
    """Moves values between this process and the storage. ``timeout_s`` bounds every call."""

    def save(self, segments: Sequence[Segment], values: Stored, timeout_s: float) -> Any:
        """Store values under reserved keys, and return the description with which readers load them."""

    def load(self, segments: Sequence[Segment], timeout_s: float) -> Sequence[Loaded]:
        """Return of each segment the values of the columns that it names.

        Raises StorageFailed or CorruptData when the values are gone, or belong to another segment.
        """

    def close(self) -> None:
        """Disconnect this process."""


class DataPlaneClient:
    """A ``DataPlane`` that asks a host and moves values through a store. Several threads may use it."""

    def __init__(self, host: Host, store: Store, *, client_id: str, writer: str, timeout_s: float) -> None:
        """Build a client. ``client_id`` is unique within the run; ``writer`` names this process in errors."""
        self._host, self._store = host, store
        self._writer, self._timeout_s = writer, timeout_s
        # Not a generator, which two threads cannot advance at once.
        self._keys = map(f"{client_id}.{{}}".format, itertools.count())
        self._lock = threading.Lock()
        self._infos: dict[str, PartitionInfo] = {}
        self._caches: dict[str, PartitionCache] = {}  # by storage id

    def put(
        self,
        partition: str,
        columns: Mapping[str, ColumnData],
        *,
        lengths: Sequence[int],
        chunk_sizes: Sequence[int],
        tags: Mapping[str, Sequence[TagValue]],
    ) -> KVBatchMeta:
        chunks = self._new_chunks(partition, lengths, chunk_sizes)
        meta = KVBatchMeta(
            partition=partition,
            chunks=chunks,
            rows=tuple(
                (index, row) for index, chunk in enumerate(chunks) for row in range(len(chunk.lengths))
            ),
            columns=frozenset(columns),
            tags={name: tuple(values) for name, values in tags.items()},
        )
        new_chunks = {chunk.key: len(chunk.lengths) for chunk in chunks}

        def save(info: PartitionInfo) -> None:
            wired = self._wired(info, meta, columns)
            self._save(info, cutting.cut_put(info, meta, wired, self._keys), new_chunks)

        self._retry_if_reopened(partition, save)
        return meta

    def write(self, meta: KVBatchMeta, columns: Mapping[str, ColumnData]) -> KVBatchMeta:
        def save_and_keep(info: PartitionInfo) -> KVBatchMeta:
            wired = self._wired(info, meta, columns)
            cutting.check_adds(info, columns)
            saved = cutting.cut_write(info, meta, wired, self._keys)
            self._save(info, saved, {})
            kept = cutting.cut_for_cache(info, meta, wired, saved)
            chunks = {chunk.key: chunk for chunk in meta.chunks}
            with self._lock:
                for name, pieces, array in kept:
                    self._cache(info).add(info.columns[name], pieces, array, chunks)
            return meta.with_columns(*(info.columns[name] for name in columns))

        return self._retry_if_reopened(meta.partition, save_and_keep) if len(meta) else meta

    def fetch(self, meta: KVBatchMeta, columns: Sequence[str]) -> dict[str, ColumnData]:
        if not columns:
            raise ValueError(f"fetch from partition {meta.partition!r} names no columns")
        known = self._known(meta.partition)
        if known is not None:
            try:
                return self._fetch(known, meta, columns)
            except UnknownPartition:
                self.forget(meta.partition)
        return self._fetch(None, meta, columns)

    def clear(self, meta: KVBatchMeta) -> None:
        if len(meta):
            self._retry_if_reopened(meta.partition, lambda info: self._clear(info, extents(meta)))

    def forget(self, partition: str) -> None:
        with self._lock:
            info = self._infos.pop(partition, None)
            if info is not None:
                self._caches.pop(info.storage_id, None)

    def take_operations(self) -> Sequence[Operation]:
        return ()

    def close(self) -> None:
        """Disconnect this process; the storage stays up."""
        self._store.close()

    def _new_chunks(
        self, partition: str, lengths: Sequence[int], chunk_sizes: Sequence[int]
    ) -> tuple[Chunk, ...]:
        if sum(chunk_sizes) != len(lengths) or min(chunk_sizes, default=1) < 1:
            raise ValueError(
                f"put to partition {partition!r}: chunk_sizes must be positive and sum to the number of "
                f"samples, {len(lengths)}; they sum to {sum(chunk_sizes)}, the smallest is "
                f"{min(chunk_sizes, default=0)}"
            )
        if not lengths or min(lengths) < 0:
            raise ValueError(f"put to partition {partition!r}: needs samples, with lengths of 0 or more")
        bounds = itertools.accumulate(chunk_sizes, initial=0)
        return tuple(
            Chunk(next(self._keys), tuple(map(int, lengths[start:stop])))
            for start, stop in itertools.pairwise(bounds)
        )

    @staticmethod
    def _wired(info: PartitionInfo, meta: KVBatchMeta, columns: Mapping[str, ColumnData]) -> dict[str, Any]:
        """Check the columns, and return them in the form in which they are stored (``codec.to_wire``)."""
        if not columns:
            raise ValueError(f"a write to partition {meta.partition!r} names no columns")
        lengths = meta.lengths
        return {
            name: codec.to_wire(
                cutting.declared_column(info, name),
                values,
                lengths=lengths,
                num_prompts=len(meta.chunks),
                partition=info.name,
            )
            for name, values in columns.items()
        }

    def _save(self, info: PartitionInfo, saved: Sequence[cutting.Filled], new_chunks: dict[str, int]) -> None:
        """Reserve room, save and commit; when save or commit fails, let the host free the segments."""
        deadline = Deadline(self._timeout_s)
        segments = tuple([segment for segment, _ in saved])
        sizes = [sum([array.nbytes for array in values.values()]) for _, values in saved]
        reserved = self._ask("reserve", info, deadline, info.storage_id, segments, sizes)
        segments = with_write(segments, reserved)
        try:
            by_column = {name: [values[name] for _, values in saved] for name in segments[0].columns}
            segments = with_write(segments, self._store.save(segments, by_column, deadline.remaining()))
            self._ask("commit", info, deadline, info.storage_id, Commit(self._writer, segments, new_chunks))
        except DataPlaneError:
            # A dead storage fails this call too, but the first error is the one to report.
            with suppress(DataPlaneError):
                self._ask("discard", info, deadline, info.storage_id, segments)
            raise

    def _fetch(
        self, info: PartitionInfo | None, meta: KVBatchMeta, columns: Sequence[str]
    ) -> dict[str, ColumnData]:
        wanted = extents(meta)
        with self._lock:
            cache = PartitionCache() if info is None else self._cache(info)
            wants = cutting.wants_for({name: cache.missing(name, wanted) for name in columns})
        if wants or info is None:
            info = self._load(info, meta, wants)
        declared = {name: cutting.declared_column(info, name) for name in columns}
        with self._lock:
            cache = self._cache(info)
            return {name: cache.gather(column, wanted) for name, column in declared.items()}

    def _load(self, info: PartitionInfo | None, meta: KVBatchMeta, wants: Sequence[Want]) -> PartitionInfo:
        """Wait until the wanted values are written, then load them into the cache."""
        deadline = Deadline(self._timeout_s)
        info, segments = self._locate(info, meta, wants, deadline)
        chunks = {chunk.key: chunk for chunk in meta.chunks}
        try:
            loaded = self._load_segments(info, segments, chunks, deadline)
        except (StorageFailed, CorruptData):
            # The samples may have been cleared meanwhile, and their keys given to other segments: then this
            # call raises UnknownSamples or UnknownPartition, which says more than the storage's error.
            self._locate(info, meta, wants, deadline)
            raise
        with self._lock:
            cache = self._cache(info)
            for segment, arrays in loaded:
                for name, array in arrays.items():
                    cache.add(info.columns[name], segment.pieces, array, chunks)
        return info

    def _locate(
        self, info: PartitionInfo | None, meta: KVBatchMeta, wants: Sequence[Want], deadline: Deadline
    ) -> tuple[PartitionInfo, list[Segment]]:
        timeout_s = deadline.remaining()
        storage_id = info.storage_id if info is not None else None
        info, segments = self._host.ask(
            "locate", meta.partition, timeout_s, meta.partition, storage_id, wants, timeout_s
        )
        self._remember(info)
        return info, segments

    def _load_segments(
        self,
        info: PartitionInfo,
        segments: Sequence[Segment],
        chunks: Mapping[str, Chunk],
        deadline: Deadline,
    ) -> list[cutting.Filled]:
        if not segments:
            return []
        values = self._store.load(segments, deadline.remaining())
        loaded = list(zip(segments, values, strict=True))
        for segment, of_segment in loaded:
            cutting.check_segment(info, segment, chunks)
            for name, array in of_segment.items():
                cutting.check_loaded(info, info.columns[name], segment, array)
        return loaded

    def _clear(self, info: PartitionInfo, cleared: Sequence[Extent]) -> None:
        with self._lock:
            self._cache(info).clear(cleared)
        self._ask("clear", info, Deadline(self._timeout_s), info.storage_id, all_rows(cleared))

    def _ask(self, method: str, info: PartitionInfo, deadline: Deadline, *args: Any) -> Any:
        return self._host.ask(method, info.name, deadline.remaining(), info.name, *args)

    def _cache(self, info: PartitionInfo) -> PartitionCache:
        return self._caches.setdefault(info.storage_id, PartitionCache())

    def _retry_if_reopened(self, partition: str, action: Callable[[PartitionInfo], _T]) -> _T:
        """Run ``action`` with the partition's description, and return its result.

        When that partition was closed meanwhile, ask the host for the partition that is now open under the
        same name, and run ``action`` again.
        """
        known = self._known(partition)
        if known is not None:
            try:
                return action(known)
            except UnknownPartition:
                self.forget(partition)
        info = self._host.ask("describe", partition, self._timeout_s, partition)
        self._remember(info)
        return action(info)

    def _known(self, partition: str) -> PartitionInfo | None:
        with self._lock:
            return self._infos.get(partition)

    def _remember(self, info: PartitionInfo) -> None:
        with self._lock:
            # Not every process calls forget(); so values of closed partitions are dropped here.
            self._infos = {
                name: one for name, one in self._infos.items() if one.storage_id in info.open_ids
            } | {info.name: info}
            self._caches = {key: cache for key, cache in self._caches.items() if key in info.open_ids}


class Deadline:
    """A moment ``timeout_s`` from now."""

    def __init__(self, timeout_s: float) -> None:
        self._end = time.monotonic() + timeout_s

    def remaining(self) -> float:
        """Return the seconds left, at least 0.001, so that an answer that is ready already still counts."""
        return max(0.001, self._end - time.monotonic())
