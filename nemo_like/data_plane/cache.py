"""What one process keeps of a partition: the values it fetched or wrote, so that none moves twice."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from nemo_like.data_plane import codec
from nemo_like.data_plane.columns import Column, Layout
from nemo_like.data_plane.meta import Chunk, KVBatchMeta
from nemo_like.data_plane.segments import Part


class _Held(NamedTuple):
    """Where the values of one chunk's rows are: in ``values`` from ``start``, in units of tokens or rows."""

    values: np.ndarray
    start: int
    offsets: dict[int, int] | None  # row -> units after start; None: every row of the chunk, in order


class PartitionCache:
    """Values of one partition by column and chunk. Not thread-safe: the client locks around it."""

    def __init__(self) -> None:
        self._held: dict[str, dict[str, list[_Held]]] = {}

    def add(
        self, column: Column, parts: Sequence[Part], values: np.ndarray, chunks: dict[str, Chunk]
    ) -> None:
        """Keep one segment's values of a column; parts of chunks that are not in ``chunks`` are skipped."""
        held = self._held.setdefault(column.name, {})
        per_token = column.layout is Layout.per_token
        start = 0
        for part in parts:
            chunk = chunks.get(part.chunk)
            if chunk is not None:
                offsets = None
                if part.rows is not None:
                    units = [chunk.lengths[row] if per_token else 1 for row in part.rows]
                    offsets = dict(zip(part.rows, accumulate(units, initial=0), strict=False))
                held.setdefault(part.chunk, []).append(_Held(values, start, offsets))
            start += part.num_tokens if per_token else part.num_rows

    def missing(self, column: str, meta: KVBatchMeta) -> list[int]:
        """Positions in the meta whose values are not here."""
        held = self._held.get(column)
        if held is None:
            return list(range(len(meta)))
        whole = [any(one.offsets is None for one in held.get(chunk.key, ())) for chunk in meta.chunks]
        return [
            position
            for position, (chunk, row) in enumerate(meta.rows)
            if not whole[chunk] and not self._has(held, meta.chunks[chunk].key, row)
        ]

    def gather(self, column: Column, meta: KVBatchMeta) -> Any:
        """The column of the meta's samples in its order; everything must be here."""
        if not codec.is_dense(column):
            return [
                codec.unpack_row(column, values, start + index)
                for values, start, stop in self._runs(column, meta)
                for index in range(stop - start)
            ]
        pieces = [values[start:stop] for values, start, stop in self._runs(column, meta)]
        if not pieces:
            pieces = [np.empty((0, *column.inner_shape), codec.wire_dtype(column))]
        return codec.from_wire(column, pieces[0] if len(pieces) == 1 else np.concatenate(pieces))

    @staticmethod
    def _has(held: dict[str, list[_Held]], chunk: str, row: int) -> bool:
        return any(one.offsets is None or row in one.offsets for one in held.get(chunk, ()))

    def _runs(self, column: Column, meta: KVBatchMeta) -> Iterator[tuple[np.ndarray, int, int]]:
        """The meta's samples as slices (values, start, stop), neighbours merged: few for whole chunks."""
        held = self._held.get(column.name, {})
        per_token = column.layout is Layout.per_token
        bounds = [
            tuple(accumulate(chunk.lengths, initial=0)) if per_token else range(len(chunk.lengths) + 1)
            for chunk in meta.chunks
        ]
        values, start, stop = None, 0, 0
        for chunk, row in meta.rows:
            found = next(
                one for one in held[meta.chunks[chunk].key] if one.offsets is None or row in one.offsets
            )
            offset = bounds[chunk][row] if found.offsets is None else found.offsets[row]
            begin = found.start + offset
            end = begin + bounds[chunk][row + 1] - bounds[chunk][row]
            if found.values is values and begin == stop:
                stop = end
                continue
            if values is not None:
                yield values, start, stop
            values, start, stop = found.values, begin, end
        if values is not None:
            yield values, start, stop
