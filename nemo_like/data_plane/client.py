"""The data-plane client of one process, over any storage.

    put / write    check ─▶ cut into segments ─▶ store the bytes ─▶ commit: now they are readable
    fetch          cache? ─▶ locate (waits for the writers) ─▶ load the bytes ─▶ check ─▶ cache ─▶ gather

Nothing can be read before its commit, so a writer that dies half-way leaves no half-written sample.
``Catalog`` answers where things are, ``SegmentStore`` holds bytes; the two differ per backend, all
strictness is here and in the registry.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import numpy as np

from nemo_like.data_plane import codec
from nemo_like.data_plane.cache import PartitionCache, spans
from nemo_like.data_plane.columns import Column, Layout
from nemo_like.data_plane.errors import (
    CorruptData,
    DataPlaneError,
    UnknownColumn,
    UnknownPartition,
)
from nemo_like.data_plane.interface import ColumnData
from nemo_like.data_plane.meta import Chunk, KVBatchMeta, TagValue
from nemo_like.data_plane.segments import Commit, Part, PartitionInfo, Rows, Segment, Want, split

# Below this many bytes, small chunks share one storage key.
SEGMENT_BYTES = 128 << 10

Stored = Mapping[str, Sequence[np.ndarray]]  # column -> one array per segment
_T = TypeVar("_T")


class Catalog(Protocol):
    """The registry as this process reaches it. ``timeout_s`` bounds every call."""

    def describe(self, name: str, timeout_s: float) -> PartitionInfo: ...

    def reserve(self, info: PartitionInfo, sizes: Mapping[str, int], timeout_s: float) -> None:
        """Room for keys (key -> bytes) that are about to be saved; raises CapacityExceeded."""

    def release(self, info: PartitionInfo, keys: Sequence[str], timeout_s: float) -> None:
        """Give reserved room back."""

    def commit(self, info: PartitionInfo, commit: Commit, timeout_s: float) -> None: ...

    def locate(self, info: PartitionInfo, wants: Sequence[Want], timeout_s: float) -> list[Segment]:
        """Waits until everything wanted is written; raises MissingData when the time is over."""

    def clear(self, info: PartitionInfo, rows: Rows, timeout_s: float) -> None:
        """Drops rows and frees the segments that nothing needs any more."""


class SegmentStore(Protocol):
    """Bytes by key. ``timeout_s`` bounds every call."""

    def save(
        self, info: PartitionInfo, keys: Sequence[str], values: Stored, timeout_s: float
    ) -> Sequence[Any]:
        """One address per key, which ``load`` gets back. Stores all or nothing."""

    def load(
        self, info: PartitionInfo, segments: Sequence[Segment], columns: Sequence[str], timeout_s: float
    ) -> Stored: ...

    def discard(self, info: PartitionInfo, segments: Sequence[Segment], timeout_s: float) -> None: ...


class PackedDataPlane:
    """``DataPlane`` over a catalog and a store. Safe to use from several threads."""

    def __init__(
        self, catalog: Catalog, store: SegmentStore, *, client_id: str, writer: str, timeout_s: float
    ) -> None:
        """``client_id`` is unique within the run; ``writer`` names this process in errors."""
        self._catalog = catalog
        self._store = store
        self._writer = writer
        self._timeout_s = timeout_s
        self._keys = (f"{client_id}.{number}" for number in itertools.count())
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
        self._retry_if_reopened(partition, lambda info: self._save(info, meta, columns, new_chunks))
        return meta

    def write(self, meta: KVBatchMeta, columns: Mapping[str, ColumnData]) -> KVBatchMeta:
        def save_and_keep(info: PartitionInfo) -> None:
            saved = self._save(info, meta, columns, {})
            chunks = {chunk.key: chunk for chunk in meta.chunks}
            with self._lock:
                for segment, values in saved:
                    for name, array in values.items():
                        # A copy: the caller may reuse its buffer.
                        self._cache(info).add(info.columns[name], segment.parts, array.copy(), chunks)

        if len(meta):
            self._retry_if_reopened(meta.partition, save_and_keep)
        return meta.with_columns(*columns)

    def fetch(self, meta: KVBatchMeta, columns: Sequence[str]) -> dict[str, ColumnData]:
        if not columns:
            raise ValueError(f"fetch from partition {meta.partition!r} names no columns")
        return self._retry_if_reopened(meta.partition, lambda info: self._fetch(info, meta, columns))

    def clear(self, meta: KVBatchMeta) -> None:
        if len(meta):
            wanted = PartitionCache().missing("", spans(meta))
            self._retry_if_reopened(
                meta.partition, lambda info: self._catalog.clear(info, wanted, self._timeout_s)
            )

    def forget(self, partition: str) -> None:
        with self._lock:
            info = self._infos.pop(partition, None)
            if info is not None:
                self._caches.pop(info.storage_id, None)

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
            Chunk(next(self._keys), tuple(int(length) for length in lengths[start:stop]))
            for start, stop in itertools.pairwise(bounds)
        )

    def _save(
        self,
        info: PartitionInfo,
        meta: KVBatchMeta,
        columns: Mapping[str, ColumnData],
        new_chunks: dict[str, int],
    ) -> list[tuple[Segment, dict[str, np.ndarray]]]:
        """Check, store and commit; what was stored."""
        if not columns:
            raise ValueError(f"a write to partition {meta.partition!r} names no columns")
        deadline = _Deadline(self._timeout_s)
        wired = {
            name: codec.to_wire(_declared(info, name), values, lengths=meta.lengths, partition=info.name)
            for name, values in columns.items()
        }
        saved = self._cut(info, meta, wired)
        keys = [segment.key for segment, _ in saved]
        if info.has_capacity_limit:
            sizes = [sum(array.nbytes for array in values.values()) for _, values in saved]
            self._catalog.reserve(info, dict(zip(keys, sizes, strict=True)), deadline.remaining())
        stored: tuple[Segment, ...] = ()
        try:
            by_column = {name: [values[name] for _, values in saved] for name in wired}
            addresses = self._store.save(info, keys, by_column, deadline.remaining())
            stored = tuple(
                segment._replace(address=address)
                for (segment, _), address in zip(saved, addresses, strict=True)
            )
            self._catalog.commit(info, Commit(self._writer, stored, new_chunks), deadline.remaining())
        except DataPlaneError:
            # A storage that is gone can't be cleaned, and that is not the error to report.
            with suppress(DataPlaneError):
                self._store.discard(info, stored, deadline.remaining())
                if info.has_capacity_limit:
                    self._catalog.release(info, keys, deadline.remaining())
            raise
        return saved

    def _cut(
        self, info: PartitionInfo, meta: KVBatchMeta, wired: Mapping[str, Any]
    ) -> list[tuple[Segment, dict[str, np.ndarray]]]:
        """Consecutive samples of one chunk become parts, parts become segments of a worthwhile size."""
        parts = _parts(meta)
        token_bytes, row_bytes = _bytes_per_unit(info, wired)
        sizes = [part.num_tokens * token_bytes + part.num_rows * row_bytes for part in parts]
        saved = []
        row = token = 0
        for group in split(parts, sizes, SEGMENT_BYTES):
            next_row = row + sum(part.num_rows for part in group)
            next_token = token + sum(part.num_tokens for part in group)
            values = {}
            for name, data in wired.items():
                column = info.columns[name]
                if column.layout is Layout.per_token:
                    values[name] = data[token:next_token]
                elif column.layout is Layout.per_sample:
                    values[name] = data[row:next_row]
                else:
                    values[name] = codec.pack_rows(column, data[row:next_row])
            saved.append((Segment(next(self._keys), tuple(wired), tuple(group)), values))
            row, token = next_row, next_token
        return saved

    def _fetch(self, info: PartitionInfo, meta: KVBatchMeta, columns: Sequence[str]) -> dict[str, ColumnData]:
        declared = {name: _declared(info, name) for name in columns}
        wanted = spans(meta)
        with self._lock:
            cache = self._cache(info)
            missing = {name: cache.missing(name, wanted) for name in declared}
        wants = _wants(missing)
        if wants:
            self._load(info, meta, wants, cache)
        with self._lock:
            return {name: cache.gather(column, wanted) for name, column in declared.items()}

    def _load(
        self, info: PartitionInfo, meta: KVBatchMeta, wants: Sequence[Want], cache: PartitionCache
    ) -> None:
        deadline = _Deadline(self._timeout_s)
        segments = self._catalog.locate(info, wants, deadline.remaining())
        chunks = {chunk.key: chunk for chunk in meta.chunks}
        for columns, group in _by_columns(segments).items():
            loaded = self._store.load(info, group, columns, deadline.remaining())
            for name in columns:
                column = info.columns[name]
                for segment, array in zip(group, loaded[name], strict=True):
                    _check_loaded(info, column, segment, array, chunks)
                with self._lock:
                    for segment, array in zip(group, loaded[name], strict=True):
                        cache.add(column, segment.parts, array, chunks)

    def _cache(self, info: PartitionInfo) -> PartitionCache:
        return self._caches.setdefault(info.storage_id, PartitionCache())

    def _retry_if_reopened(self, partition: str, action: Callable[[PartitionInfo], _T]) -> _T:
        """Run with the partition's description; once more when it was closed and opened again since."""
        with self._lock:
            known = self._infos.get(partition)
        if known is not None:
            try:
                return action(known)
            except UnknownPartition:
                self.forget(partition)
        info = self._catalog.describe(partition, self._timeout_s)
        with self._lock:
            self._infos[partition] = info
            # Whoever forgot to forget: partitions that are closed by now need no copies.
            self._caches = {key: cache for key, cache in self._caches.items() if key in info.open_ids}
        return action(info)


class _Deadline:
    def __init__(self, timeout_s: float) -> None:
        self._end = time.monotonic() + timeout_s

    def remaining(self) -> float:
        return max(0.001, self._end - time.monotonic())


def _declared(info: PartitionInfo, name: str) -> Column:
    if name not in info.columns:
        raise UnknownColumn(
            f"partition {info.name!r} has no column {name!r}; declared are: {', '.join(sorted(info.columns))}"
        )
    return info.columns[name]


def _parts(meta: KVBatchMeta) -> list[Part]:
    """Runs of consecutive samples of the same chunk."""
    parts = []
    for index, run in itertools.groupby(meta.rows, key=lambda place: place[0]):
        chunk = meta.chunks[index]
        rows = tuple(row for _, row in run)
        if rows == tuple(range(len(chunk.lengths))):
            parts.append(Part(chunk.key, None, len(rows), sum(chunk.lengths)))
        else:
            parts.append(Part(chunk.key, rows, len(rows), sum(chunk.lengths[row] for row in rows)))
    return parts


def _wants(missing: Mapping[str, Rows]) -> tuple[Want, ...]:
    """Columns that miss the same rows share one entry."""
    columns: dict[Rows, list[str]] = {}
    for name, rows in missing.items():
        if rows:
            columns.setdefault(rows, []).append(name)
    return tuple(Want(tuple(names), rows) for rows, names in columns.items())


def _by_columns(segments: Sequence[Segment]) -> dict[tuple[str, ...], list[Segment]]:
    groups: dict[tuple[str, ...], list[Segment]] = {}
    for segment in segments:
        groups.setdefault(segment.columns, []).append(segment)
    return groups


def _bytes_per_unit(info: PartitionInfo, wired: Iterable[str]) -> tuple[int, int]:
    """Bytes per token of the per_token columns, and per row of the others (estimated where not dense)."""
    token_bytes = row_bytes = 0
    for name in wired:
        column = info.columns[name]
        if not codec.is_dense(column):
            row_bytes += SEGMENT_BYTES // 16
            continue
        size = codec.wire_dtype(column).itemsize * int(np.prod(column.inner_shape, dtype=np.int64))
        if column.layout is Layout.per_token:
            token_bytes += size
        else:
            row_bytes += size
    return token_bytes, row_bytes


def _check_loaded(
    info: PartitionInfo, column: Column, segment: Segment, array: Any, chunks: Mapping[str, Chunk]
) -> None:
    """The storage gave back exactly what the registry and the meta promise."""
    where = f"partition {info.name!r}, column {column.name!r}, segment {segment.key!r}"
    for part in segment.parts:
        chunk = chunks.get(part.chunk)
        if chunk is not None:
            rows = range(len(chunk.lengths)) if part.rows is None else part.rows
            promised = sum(chunk.lengths[row] for row in rows if row < len(chunk.lengths))
            if len(rows) != part.num_rows or promised != part.num_tokens:
                raise CorruptData(
                    f"{where}: chunk {part.chunk} was written with {part.num_rows} rows of "
                    f"{part.num_tokens} tokens, but the batch says {len(rows)} rows of {promised} tokens"
                )
    num_rows = sum(part.num_rows for part in segment.parts)
    if not isinstance(array, np.ndarray) or array.dtype != codec.wire_dtype(column):
        raise CorruptData(
            f"{where}: stored {codec.wire_dtype(column)}, got {getattr(array, 'dtype', type(array).__name__)}"
        )
    if not codec.is_dense(column):
        if codec.num_packed_rows(array) != num_rows:
            raise CorruptData(f"{where}: stored {num_rows} rows, got {codec.num_packed_rows(array)}")
        return
    num_tokens = sum(part.num_tokens for part in segment.parts)
    expected = (num_tokens if column.layout is Layout.per_token else num_rows, *column.inner_shape)
    if array.shape != expected:
        raise CorruptData(f"{where}: stored shape {list(expected)}, got {list(array.shape)}")
