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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Protocol, TypeVar

import numpy as np

from nemo_like.data_plane import codec, layout
from nemo_like.data_plane.cache import PartitionCache, Span, spans
from nemo_like.data_plane.deadline import Deadline
from nemo_like.data_plane.errors import (
    CapacityExceeded,
    DataPlaneError,
    StorageFailed,
    UnknownPartition,
)
from nemo_like.data_plane.interface import ColumnData
from nemo_like.data_plane.meta import Chunk, KVBatchMeta, TagValue
from nemo_like.data_plane.operations import Operation
from nemo_like.data_plane.scratch import Scratch
from nemo_like.data_plane.segments import (
    Commit,
    PartitionInfo,
    Replacement,
    Rows,
    Segment,
    Thinned,
    Want,
)

Stored = Mapping[str, Sequence[np.ndarray]]  # column -> one array per segment
_T = TypeVar("_T")


class Catalog(Protocol):
    """The registry as this process reaches it. ``timeout_s`` bounds every call."""

    def describe(self, name: str, timeout_s: float) -> PartitionInfo: ...

    def find(self, name: str, wants: Sequence[Want], timeout_s: float) -> tuple[PartitionInfo, list[Segment]]:
        """``describe`` and ``locate`` in one."""

    def reserve(self, info: PartitionInfo, sizes: Mapping[str, int], timeout_s: float) -> None:
        """Room for keys (key -> bytes) that are about to be saved; raises CapacityExceeded."""

    def release(self, info: PartitionInfo, keys: Sequence[str], timeout_s: float) -> None:
        """Give reserved room back."""

    def commit(self, info: PartitionInfo, commit: Commit, timeout_s: float) -> None: ...

    def locate(self, info: PartitionInfo, wants: Sequence[Want], timeout_s: float) -> list[Segment]:
        """Waits until everything wanted is written; raises MissingData when the time is over."""

    def clear(self, info: PartitionInfo, rows: Rows, timeout_s: float) -> Sequence[Thinned]:
        """Drops rows and frees the segments that nothing needs any more. Returns the segments of which
        some parts are needed, for ``replace``."""

    def replace(
        self, info: PartitionInfo, replacements: Sequence[Replacement], timeout_s: float
    ) -> Sequence[Thinned]:
        """Puts stored segments in the place of others, which it frees; returns as ``clear``."""


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
        # No generator: several threads take from it.
        self._keys = map(f"{client_id}.{{}}".format, itertools.count())
        self._scratch = Scratch()
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
        self._retry_if_reopened(partition, lambda info: self._put(info, meta, columns, new_chunks))
        return meta

    def write(self, meta: KVBatchMeta, columns: Mapping[str, ColumnData]) -> KVBatchMeta:
        def save_and_keep(info: PartitionInfo) -> None:
            wired = self._wired(info, meta, columns)
            saved = layout.cut_write(info, meta, wired, self._keys)
            self._save(info, saved, {})
            kept = layout.cut_for_cache(info, meta, wired, saved)
            chunks = {chunk.key: chunk for chunk in meta.chunks}
            with self._lock:
                for name, parts, array in kept:
                    self._cache(info).add(info.columns[name], parts, array, chunks)

        if len(meta):
            self._retry_if_reopened(meta.partition, save_and_keep)
        return meta.with_columns(*columns)

    def fetch(self, meta: KVBatchMeta, columns: Sequence[str]) -> dict[str, ColumnData]:
        if not columns:
            raise ValueError(f"fetch from partition {meta.partition!r} names no columns")
        known = self._known(meta.partition)
        if known is not None:
            try:
                return self._fetch(known, meta, columns, None)
            except UnknownPartition:
                self.forget(meta.partition)
        wants = layout.wants(dict.fromkeys(columns, PartitionCache().missing("", spans(meta))))
        info, segments = self._catalog.find(meta.partition, wants, self._timeout_s)
        self._remember(info)
        return self._fetch(info, meta, columns, segments)

    def clear(self, meta: KVBatchMeta) -> None:
        if len(meta):
            self._retry_if_reopened(meta.partition, lambda info: self._clear(info, spans(meta)))

    def forget(self, partition: str) -> None:
        with self._lock:
            info = self._infos.pop(partition, None)
            if info is not None:
                self._caches.pop(info.storage_id, None)

    def take_operations(self) -> Sequence[Operation]:
        return ()

    def close(self) -> None:
        """Nothing to disconnect, unless a backend has something."""

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

    def _put(
        self,
        info: PartitionInfo,
        meta: KVBatchMeta,
        columns: Mapping[str, ColumnData],
        new_chunks: dict[str, int],
    ) -> None:
        wired = self._wired(info, meta, columns)
        with self._scratch.joining() as join:
            self._save(info, layout.cut_put(info, meta, wired, self._keys, join), new_chunks)

    @staticmethod
    def _wired(info: PartitionInfo, meta: KVBatchMeta, columns: Mapping[str, ColumnData]) -> dict[str, Any]:
        """The columns, checked."""
        if not columns:
            raise ValueError(f"a write to partition {meta.partition!r} names no columns")
        lengths = meta.lengths
        return {
            name: codec.to_wire(layout.declared(info, name), values, lengths=lengths, partition=info.name)
            for name, values in columns.items()
        }

    def _save(
        self,
        info: PartitionInfo,
        saved: Sequence[tuple[Segment, Mapping[str, np.ndarray]]],
        new_chunks: dict[str, int],
    ) -> None:
        """Store and commit."""
        deadline = Deadline(self._timeout_s)
        keys = [segment.key for segment, _ in saved]
        if info.has_capacity_limit:
            sizes = [sum(array.nbytes for array in values.values()) for _, values in saved]
            self._catalog.reserve(info, dict(zip(keys, sizes, strict=True)), deadline.remaining())
        stored: tuple[Segment, ...] = ()
        try:
            by_column = {name: [values[name] for _, values in saved] for name in saved[0][1]}
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

    def _fetch(
        self,
        info: PartitionInfo,
        meta: KVBatchMeta,
        columns: Sequence[str],
        found: Sequence[Segment] | None,
    ) -> dict[str, ColumnData]:
        """``found``: the segments of all of it, where they are known already."""
        declared = {name: layout.declared(info, name) for name in columns}
        wanted = spans(meta)
        with self._lock:
            cache = self._cache(info)
            missing = {name: cache.missing(name, wanted) for name in declared}
        wants = layout.wants(missing)
        loaded = self._load(info, meta, wants, found) if wants else []
        chunks = {chunk.key: chunk for chunk in meta.chunks}
        with self._lock:
            for segment, arrays in loaded:
                for name, array in arrays.items():
                    cache.add(info.columns[name], segment.parts, array, chunks)
            return {name: cache.gather(column, wanted) for name, column in declared.items()}

    def _load(
        self,
        info: PartitionInfo,
        meta: KVBatchMeta,
        wants: Sequence[Want],
        found: Sequence[Segment] | None,
    ) -> list[tuple[Segment, dict[str, np.ndarray]]]:
        deadline = Deadline(self._timeout_s)
        segments = found or self._catalog.locate(info, wants, deadline.remaining())
        while True:
            try:
                return self._load_segments(info, meta, segments, deadline)
            except StorageFailed:
                # Another process may have cleared samples, and moved those that share their segments.
                moved = self._catalog.locate(info, wants, deadline.remaining())
                if moved == segments:
                    raise
                segments = moved

    def _load_segments(
        self, info: PartitionInfo, meta: KVBatchMeta, segments: Sequence[Segment], deadline: Deadline
    ) -> list[tuple[Segment, dict[str, np.ndarray]]]:
        chunks = {chunk.key: chunk for chunk in meta.chunks}
        loaded = []
        for columns, group in layout.by_columns(segments).items():
            values = self._store.load(info, group, columns, deadline.remaining())
            for position, segment in enumerate(group):
                layout.check_segment(info, segment, chunks)
                of_segment = {name: values[name][position] for name in columns}
                for name, array in of_segment.items():
                    layout.check_loaded(info, info.columns[name], segment, array)
                loaded.append((segment, of_segment))
        return loaded

    def _clear(self, info: PartitionInfo, dropped: Sequence[Span]) -> None:
        deadline = Deadline(self._timeout_s)
        with self._lock:
            self._cache(info).drop(dropped)
        rows = PartitionCache().missing("", dropped)
        thinned = self._catalog.clear(info, rows, deadline.remaining())
        while thinned:
            thinned = self._compact(info, thinned, deadline)

    def _compact(
        self, info: PartitionInfo, thinned: Sequence[Thinned], deadline: Deadline
    ) -> Sequence[Thinned]:
        """Small chunks share segments: what is left of those is stored anew, so that the rest is freed.
        Returns the segments that others thinned meanwhile."""
        try:
            replacements = [
                replacement
                for columns, group in layout.thinned_by_columns(thinned).items()
                for replacement in self._rewrite(info, columns, group, deadline)
            ]
        except CapacityExceeded:
            return ()  # No room for the copy: these bytes go when the rest of their segment does.
        try:
            return self._catalog.replace(info, replacements, deadline.remaining())
        except DataPlaneError:
            # The partition was closed meanwhile, and what came after its end has to go as well.
            with suppress(DataPlaneError):
                self._store.discard(info, [one.segment for one in replacements], deadline.remaining())
            raise

    def _rewrite(
        self, info: PartitionInfo, columns: tuple[str, ...], group: Sequence[Thinned], deadline: Deadline
    ) -> list[Replacement]:
        """Store the live parts of segments under new keys."""
        segments = [one.segment for one in group]
        loaded = self._store.load(info, segments, columns, deadline.remaining())
        for name in columns:
            for segment, array in zip(segments, loaded[name], strict=True):
                layout.check_loaded(info, info.columns[name], segment, array)
        kept = {
            name: [
                layout.live_values(info.columns[name], one, array)
                for one, array in zip(group, loaded[name], strict=True)
            ]
            for name in columns
        }
        keys = [next(self._keys) for _ in group]
        addresses = self._store.save(info, keys, kept, deadline.remaining())
        return [
            Replacement(
                old.key,
                Segment(key, columns, tuple(old.parts[i] for i in live), address),
                sum(kept[name][position].nbytes for name in columns),
            )
            for position, ((old, live), key, address) in enumerate(zip(group, keys, addresses, strict=True))
        ]

    def _cache(self, info: PartitionInfo) -> PartitionCache:
        return self._caches.setdefault(info.storage_id, PartitionCache())

    def _retry_if_reopened(self, partition: str, action: Callable[[PartitionInfo], _T]) -> _T:
        """Run with the partition's description; once more when it was closed and opened again since."""
        known = self._known(partition)
        if known is not None:
            try:
                return action(known)
            except UnknownPartition:
                self.forget(partition)
        info = self._catalog.describe(partition, self._timeout_s)
        self._remember(info)
        return action(info)

    def _known(self, partition: str) -> PartitionInfo | None:
        with self._lock:
            return self._infos.get(partition)

    def _remember(self, info: PartitionInfo) -> None:
        with self._lock:
            # Not everyone forgets, and of partitions that are closed by now nothing is needed.
            self._infos = {
                name: one for name, one in self._infos.items() if one.storage_id in info.open_ids
            } | {info.name: info}
            self._caches = {key: cache for key, cache in self._caches.items() if key in info.open_ids}
