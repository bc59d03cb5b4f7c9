"""Pure functions that cut samples into segments, and that check the segments which a load returns."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import Any

import numpy as np

from nemo_like.batch.columns import Column, Layout
from nemo_like.batch.meta import Chunk, KVBatchMeta
from nemo_like.batch.sharding import deal_chunks
from nemo_like.data_plane import codec
from nemo_like.data_plane.segments import PartitionInfo, Rows, Segment, SegmentPiece, Want, split_by_size
from nemo_like.data_plane.storage_errors import ColumnMismatch, CorruptData, UnknownColumn

# A segment of this size takes no further chunk. Values that are read together are fastest under one key, but
# a large batch should be spread over several storage units.
_MAX_SEGMENT_BYTES = 64 << 20
# An estimate: an object has no size before it is packed.
_GUESSED_OBJECT_BYTES = 8 << 10

Filled = tuple[Segment, Mapping[str, np.ndarray]]  # a segment and its values by column


def declared_column(info: PartitionInfo, name: str) -> Column:
    """Return the declaration of the column ``name``. Raises UnknownColumn."""
    if name not in info.columns:
        raise UnknownColumn(
            f"partition {info.name!r} has no column {name!r}; declared are: {', '.join(sorted(info.columns))}"
        )
    return info.columns[name]


def check_adds(info: PartitionInfo, names: Iterable[str]) -> None:
    """Raise ColumnMismatch when a column is per_prompt. It can't be added to existing samples: a writer that
    has some samples of a prompt's group does not know which writer has the rest."""
    for name in names:
        if info.columns[name].per_prompt:
            raise ColumnMismatch(
                f"column {name!r} of partition {info.name!r} has one value per prompt, so it must come with "
                "the put of its samples"
            )


def cut_put(
    info: PartitionInfo, meta: KVBatchMeta, wired: Mapping[str, Any], keys: Iterator[str]
) -> list[Filled]:
    """Cut new samples into segments, and give each the next of ``keys``.

    Where the partition's number of readers is known, the chunks that one rank will read are stored together;
    else each chunk is a segment, since it may be cleared by itself. ``wired`` comes from ``codec.to_wire``.
    """
    pieces = _pieces(meta)
    if info.num_readers is None:
        groups = [[index] for index in range(len(pieces))]
    else:
        tokens, num_rows = [piece.num_tokens for piece in pieces], [piece.num_rows for piece in pieces]
        homes = deal_chunks(tokens, num_rows, info.num_readers) or [list(range(len(pieces)))]
        sizes = _sizes(info, pieces, wired)
        groups = [
            group
            for home in homes
            for group in split_by_size(home, [sizes[index] for index in home], _MAX_SEGMENT_BYTES)
        ]
    return _segments(info, pieces, wired, groups, keys)


def cut_write(
    info: PartitionInfo, meta: KVBatchMeta, wired: Mapping[str, Any], keys: Iterator[str]
) -> list[Filled]:
    """Cut added columns into segments, and give each the next of ``keys``.

    The samples stay together, since a process that writes them together mostly reads them together.
    """
    pieces = _pieces(meta)
    groups = split_by_size(range(len(pieces)), _sizes(info, pieces, wired), _MAX_SEGMENT_BYTES)
    return _segments(info, pieces, wired, groups, keys)


def cut_for_cache(
    info: PartitionInfo,
    meta: KVBatchMeta,
    wired: Mapping[str, Any],
    saved: Sequence[Filled],
) -> Iterator[tuple[str, Sequence[SegmentPiece], np.ndarray]]:
    """Yield (column, pieces, values of these pieces) for the cache of the process that wrote ``saved``.

    A dense column stays in one array, and is copied unless it is read-only: the caller may reuse its buffer.
    """
    pieces = _pieces(meta)
    for name, data in wired.items():
        if info.columns[name].is_dense:
            yield name, pieces, data.copy() if data.flags.writeable else data
        else:
            for segment, values in saved:
                yield name, segment.pieces, values[name]


def _segments(
    info: PartitionInfo,
    pieces: Sequence[SegmentPiece],
    wired: Mapping[str, Any],
    groups: Iterable[Sequence[int]],
    keys: Iterator[str],
) -> list[Filled]:
    """Make a segment of each group; a group lists positions in ``pieces``, in ascending order."""
    tokens = list(itertools.accumulate((piece.num_tokens for piece in pieces), initial=0))
    rows = list(itertools.accumulate((piece.num_rows for piece in pieces), initial=0))
    saved: list[Filled] = []
    for group in groups:
        runs = _runs(group)
        values = {}
        for name, data in wired.items():
            column = info.columns[name]
            bounds = _bounds(column, tokens, rows)
            arrays = [data[bounds[start] : bounds[stop]] for start, stop in runs]
            if not column.is_dense:
                values[name] = codec.pack_rows(column, [value for array in arrays for value in array])
            else:
                values[name] = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
        segment = Segment(next(keys), tuple(wired), tuple([pieces[index] for index in group]))
        saved.append((segment, values))
    return saved


def _bounds(column: Column, tokens: Sequence[int], rows: Sequence[int]) -> Sequence[int]:
    """Return where each piece's values begin in a batch of the column, and where the last piece's end."""
    if column.per_prompt:
        return range(len(rows))
    return tokens if column.layout is Layout.per_token else rows


def _runs(ascending: Sequence[int]) -> list[tuple[int, int]]:
    """Return the runs of consecutive numbers, each as [start, stop)."""
    runs: list[tuple[int, int]] = []
    for number in ascending:
        if runs and runs[-1][1] == number:
            runs[-1] = (runs[-1][0], number + 1)
        else:
            runs.append((number, number + 1))
    return runs


def _sizes(info: PartitionInfo, pieces: Sequence[SegmentPiece], wired: Mapping[str, Any]) -> list[int]:
    """Estimate the bytes of each piece in these columns."""
    ragged = [name for name in wired if info.columns[name].layout is Layout.ragged]
    token_bytes, row_bytes, prompt_bytes = _bytes_per_unit(info, wired.keys() - set(ragged))
    sizes = [piece.num_tokens * token_bytes + piece.num_rows * row_bytes + prompt_bytes for piece in pieces]
    rows = list(itertools.accumulate((piece.num_rows for piece in pieces), initial=0))
    for name in ragged:
        bounds = _bounds(info.columns[name], (), rows)
        for index in range(len(pieces)):
            values = wired[name][bounds[index] : bounds[index + 1]]
            sizes[index] += sum(map(_ragged_bytes, values))
    return sizes


def _ragged_bytes(value: Any) -> int:
    """Return the bytes of a ragged value's arrays; whether it is a list of arrays is checked later."""
    return sum(getattr(array, "nbytes", 0) for array in value) if isinstance(value, list | tuple) else 0


def _pieces(meta: KVBatchMeta) -> list[SegmentPiece]:
    """Return one piece per run of consecutive samples of the same chunk."""
    pieces = []
    for index, run in itertools.groupby(meta.rows, key=itemgetter(0)):
        chunk = meta.chunks[index]
        rows = tuple(map(itemgetter(1), run))
        if rows == tuple(range(len(chunk.lengths))):
            pieces.append(SegmentPiece(chunk.key, None, len(rows), sum(chunk.lengths)))
        else:
            pieces.append(SegmentPiece(chunk.key, rows, len(rows), sum([chunk.lengths[row] for row in rows])))
    return pieces


def wants_for(missing: Mapping[str, Rows]) -> tuple[Want, ...]:
    """Return one want per set of missing rows, with all columns that miss these rows."""
    columns: dict[Rows, list[str]] = {}
    for name, rows in missing.items():
        if rows:
            columns.setdefault(rows, []).append(name)
    return tuple(Want(tuple(names), rows) for rows, names in columns.items())


def _bytes_per_unit(info: PartitionInfo, wired: Iterable[str]) -> tuple[int, int, int]:
    """Return the bytes per token, per row and per prompt. A column counts under the unit that has one of its
    values; objects are estimated."""
    token_bytes = row_bytes = prompt_bytes = 0
    for name in wired:
        column = info.columns[name]
        size = _GUESSED_OBJECT_BYTES
        if column.is_dense:
            size = codec.wire_dtype(column).itemsize * int(np.prod(column.inner_shape, dtype=np.int64))
        if column.layout is Layout.per_token:
            token_bytes += size
        elif column.per_prompt:
            prompt_bytes += size
        else:
            row_bytes += size
    return token_bytes, row_bytes, prompt_bytes


def check_segment(info: PartitionInfo, segment: Segment, chunks: Mapping[str, Chunk]) -> None:
    """Raise CorruptData unless rows and tokens of the segment's pieces agree with the batch's ``chunks``."""
    for piece in segment.pieces:
        chunk = chunks.get(piece.chunk)
        if chunk is not None:
            lengths: Sequence[int] = chunk.lengths
            if piece.rows is not None:
                lengths = [lengths[row] for row in piece.rows if row < len(lengths)]
            if len(lengths) != piece.num_rows or sum(lengths) != piece.num_tokens:
                raise CorruptData(
                    f"partition {info.name!r}, segment {segment.key!r}: chunk {piece.chunk} was written with "
                    f"{piece.num_rows} rows of {piece.num_tokens} tokens, but the batch says "
                    f"{len(lengths)} rows of {sum(lengths)} tokens"
                )


def check_loaded(info: PartitionInfo, column: Column, segment: Segment, array: Any) -> None:
    """Raise CorruptData unless the loaded array has the dtype and the shape, or rows, that were stored."""
    where = f"partition {info.name!r}, column {column.name!r}, segment {segment.key!r}"
    num_rows = len(segment.pieces) if column.per_prompt else sum(piece.num_rows for piece in segment.pieces)
    if not isinstance(array, np.ndarray) or array.dtype != codec.wire_dtype(column):
        raise CorruptData(
            f"{where}: stored {codec.wire_dtype(column)}, got {getattr(array, 'dtype', type(array).__name__)}"
        )
    if not column.is_dense:
        if codec.num_packed_rows(array) != num_rows:
            raise CorruptData(f"{where}: stored {num_rows} rows, got {codec.num_packed_rows(array)}")
        return
    num_tokens = sum(piece.num_tokens for piece in segment.pieces)
    expected = (num_tokens if column.layout is Layout.per_token else num_rows, *column.inner_shape)
    if array.shape != expected:
        raise CorruptData(f"{where}: stored shape {list(expected)}, got {list(array.shape)}")
