"""The cache of one process: it keeps the values that the process fetched or wrote, so none moves twice."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from nemo_like.batch.columns import Column, Layout
from nemo_like.batch.meta import Chunk, KVBatchMeta
from nemo_like.data_plane import codec
from nemo_like.data_plane.segments import Rows, SegmentPiece


class Extent(NamedTuple):
    """Consecutive samples of a batch that are also consecutive rows of one chunk."""

    chunk: str
    start: int  # rows [start, stop) of the chunk
    stop: int
    bounds: tuple[int, ...]  # tokens before each row of the chunk, and in all of it


def extents(meta: KVBatchMeta) -> list[Extent]:
    """Return the fewest extents that make up the batch: one for each chunk whose samples are adjacent."""
    bounds = [tuple(accumulate(chunk.lengths, initial=0)) for chunk in meta.chunks]
    found: list[Extent] = []
    chunk = start = stop = -1
    for position in meta.rows:
        if position == (chunk, stop):
            stop += 1
            continue
        if stop >= 0:
            found.append(Extent(meta.chunks[chunk].key, start, stop, bounds[chunk]))
        chunk, start = position
        stop = start + 1
    if stop >= 0:
        found.append(Extent(meta.chunks[chunk].key, start, stop, bounds[chunk]))
    return found


def all_rows(wanted: Sequence[Extent]) -> Rows:
    """Return the rows of all extents as (chunk, rows) pairs; None for rows means the whole chunk."""
    return PartitionCache().missing("", wanted)


class _Held(NamedTuple):
    """An array that holds some rows of a chunk, and where in the array they begin.

    Units are tokens for per_token columns, prompts for per_prompt ones, and rows for all others.
    """

    values: np.ndarray
    start: int  # in units: where the values begin, or from where ``offsets`` count
    offsets: dict[int, int] | None  # row -> units after start; None: every row of the chunk, in order


class PartitionCache:
    """The values of one partition by column and chunk.

    It has no lock: the client holds one around each call.
    """

    def __init__(self) -> None:
        self._held: dict[str, dict[str, list[_Held]]] = {}

    def add(
        self, column: Column, pieces: Sequence[SegmentPiece], values: np.ndarray, chunks: Mapping[str, Chunk]
    ) -> None:
        """Keep a column's ``values``, in the order of ``pieces``; skip chunks that are not in ``chunks``."""
        held = self._held.setdefault(column.name, {})
        per_token = column.layout is Layout.per_token
        start = 0
        for piece in pieces:
            chunk = chunks.get(piece.chunk)
            if chunk is not None:
                offsets = None
                if piece.rows is not None:
                    units = [chunk.lengths[row] if per_token else 1 for row in piece.rows]
                    offsets = dict(zip(piece.rows, accumulate(units, initial=0), strict=False))
                held.setdefault(piece.chunk, []).append(_Held(values, start, offsets))
            start += 1 if column.per_prompt else piece.num_tokens if per_token else piece.num_rows

    def clear(self, cleared: Sequence[Extent]) -> None:
        """Forget every chunk that has one of these samples; its other samples can be fetched again."""
        chunks = {extent.chunk for extent in cleared}
        for held in self._held.values():
            for chunk in chunks & held.keys():
                del held[chunk]

    def missing(self, column: str, wanted: Sequence[Extent]) -> Rows:
        """Return the wanted rows that the cache lacks, as (chunk, rows); None means the whole chunk."""
        held = self._held.get(column, {})
        rows: dict[str, list[int]] = {}
        num_rows: dict[str, int] = {}
        for extent in wanted:
            here = held.get(extent.chunk, ())
            if any(one.offsets is None for one in here):
                continue
            absent: Sequence[int] = range(extent.start, extent.stop)
            if here:
                absent = [row for row in absent if _find(here, row) is None]
            if absent:
                rows.setdefault(extent.chunk, []).extend(absent)
                num_rows[extent.chunk] = len(extent.bounds) - 1
        return tuple(
            (chunk, None if len(of_chunk) == num_rows[chunk] else tuple(of_chunk))
            for chunk, of_chunk in rows.items()
        )

    def gather(self, column: Column, wanted: Sequence[Extent]) -> Any:
        """Return a column's values for the extents' samples, in their order; the cache must hold all.

        A per_prompt column has one value per chunk, in the order in which the chunks first occur.
        """
        if column.per_prompt:
            wanted = [
                Extent(chunk, 0, 1, (0, 1)) for chunk in dict.fromkeys(extent.chunk for extent in wanted)
            ]
        if not column.is_dense:
            return [
                codec.unpack_row(column, values, row)
                for values, start, stop in self._slices(column, wanted)
                for row in range(start, stop)
            ]
        arrays = [values[start:stop] for values, start, stop in self._slices(column, wanted)]
        if not arrays:
            arrays = [np.empty((0, *column.inner_shape), codec.wire_dtype(column))]
        if len(arrays) > 1:
            arrays = [np.concatenate(arrays)]
            self._settle(column, wanted, arrays[0])
        return codec.from_wire(column, arrays[0])

    def _settle(self, column: Column, gathered: Sequence[Extent], values: np.ndarray) -> None:
        """Keep the gathered ``values`` in place of the arrays that they were copied from, for each chunk
        whose rows are all among them. A stage that wants the same samples in the same order then copies
        nothing."""
        held = self._held[column.name]
        per_token = column.layout is Layout.per_token
        offsets: dict[str, dict[int, int]] = {}
        begin = 0
        for extent in gathered:
            bounds: Sequence[int] = extent.bounds if per_token else range(len(extent.bounds))
            first = bounds[extent.start]
            num_rows = len(extent.bounds) - 1
            if extent.stop - extent.start == num_rows:
                held[extent.chunk] = [_Held(values, begin, None)]
            else:
                of_chunk = offsets.setdefault(extent.chunk, {})
                of_chunk.update(
                    (row, begin + bounds[row] - first) for row in range(extent.start, extent.stop)
                )
                if len(of_chunk) == num_rows:
                    held[extent.chunk] = [_Held(values, 0, of_chunk)]
            begin += bounds[extent.stop] - first

    def _slices(self, column: Column, wanted: Sequence[Extent]) -> Iterator[tuple[np.ndarray, int, int]]:
        """Yield slices (values, start, stop) that make up the extents; neighbours in one array are merged."""
        values, start, stop = None, 0, 0
        for found, begin, end in self._slices_by_extent(column, wanted):
            if found is values and begin == stop:
                stop = end
                continue
            if values is not None:
                yield values, start, stop
            values, start, stop = found, begin, end
        if values is not None:
            yield values, start, stop

    def _slices_by_extent(
        self, column: Column, wanted: Sequence[Extent]
    ) -> Iterator[tuple[np.ndarray, int, int]]:
        held = self._held.get(column.name, {})
        per_token = column.layout is Layout.per_token
        for extent in wanted:
            bounds: Sequence[int] = extent.bounds if per_token else range(len(extent.bounds))
            here = held[extent.chunk]
            whole = next((one for one in here if one.offsets is None), None)
            if whole is not None:
                yield (
                    whole.values,
                    whole.start + bounds[extent.start],
                    whole.start + bounds[extent.stop],
                )
                continue
            for row in range(extent.start, extent.stop):
                one = _find(here, row)
                assert one is not None
                assert one.offsets is not None
                begin = one.start + one.offsets[row]
                yield one.values, begin, begin + bounds[row + 1] - bounds[row]


def _find(here: Sequence[_Held], row: int) -> _Held | None:
    return next((one for one in here if one.offsets is None or row in one.offsets), None)
