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
from nemo_like.data_plane.segments import Part, PartitionInfo, Rows, Segment, Want, split
from nemo_like.data_plane.storage_errors import ColumnMismatch, CorruptData, UnknownColumn

# A segment of this size takes no further chunk. Values that are read together are fastest under one key, but
# a large batch should be spread over several storage units.
_MAX_SEGMENT_BYTES = 64 << 20
# An estimate: an object has no size before it is packed.
_GUESSED_OBJECT_BYTES = 8 << 10

Filled = tuple[Segment, Mapping[str, np.ndarray]]  # a segment and its values by column


def declared(info: PartitionInfo, name: str) -> Column:
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
    parts = _parts(meta)
    if info.num_readers is None:
        groups = [[index] for index in range(len(parts))]
    else:
        tokens, num_rows = [part.num_tokens for part in parts], [part.num_rows for part in parts]
        homes = deal_chunks(tokens, num_rows, info.num_readers) or [list(range(len(parts)))]
        sizes = _sizes(info, parts, wired)
        groups = [
            group
            for home in homes
            for group in split(home, [sizes[index] for index in home], _MAX_SEGMENT_BYTES)
        ]
    return _segments(info, parts, wired, groups, keys)


def cut_write(
    info: PartitionInfo, meta: KVBatchMeta, wired: Mapping[str, Any], keys: Iterator[str]
) -> list[Filled]:
    """Cut added columns into segments, and give each the next of ``keys``.

    The samples stay together, since a process that writes them together mostly reads them together.
    """
    parts = _parts(meta)
    groups = split(range(len(parts)), _sizes(info, parts, wired), _MAX_SEGMENT_BYTES)
    return _segments(info, parts, wired, groups, keys)


def cut_for_cache(
    info: PartitionInfo,
    meta: KVBatchMeta,
    wired: Mapping[str, Any],
    saved: Sequence[Filled],
) -> Iterator[tuple[str, Sequence[Part], np.ndarray]]:
    """Yield (column, parts, values of these parts) for the cache of the process that wrote ``saved``.

    A dense column stays in one piece, and is copied unless it is read-only: the caller may reuse its buffer.
    """
    parts = _parts(meta)
    for name, data in wired.items():
        if info.columns[name].is_dense:
            yield name, parts, data.copy() if data.flags.writeable else data
        else:
            for segment, values in saved:
                yield name, segment.parts, values[name]


def _segments(
    info: PartitionInfo,
    parts: Sequence[Part],
    wired: Mapping[str, Any],
    groups: Iterable[Sequence[int]],
    keys: Iterator[str],
) -> list[Filled]:
    """Make a segment of each group; a group lists positions in ``parts``, in ascending order."""
    tokens = list(itertools.accumulate((part.num_tokens for part in parts), initial=0))
    rows = list(itertools.accumulate((part.num_rows for part in parts), initial=0))
    saved: list[Filled] = []
    for group in groups:
        runs = _runs(group)
        values = {}
        for name, data in wired.items():
            column = info.columns[name]
            bounds = _bounds(column, tokens, rows)
            pieces = [data[bounds[start] : bounds[stop]] for start, stop in runs]
            if not column.is_dense:
                values[name] = codec.pack_rows(column, [value for piece in pieces for value in piece])
            else:
                values[name] = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        segment = Segment(next(keys), tuple(wired), tuple([parts[index] for index in group]))
        saved.append((segment, values))
    return saved


def _bounds(column: Column, tokens: Sequence[int], rows: Sequence[int]) -> Sequence[int]:
    """Return where each part's values begin in a batch of the column, and where the last part's end."""
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


def _sizes(info: PartitionInfo, parts: Sequence[Part], wired: Mapping[str, Any]) -> list[int]:
    """Estimate the bytes of each part in these columns."""
    ragged = [name for name in wired if info.columns[name].layout is Layout.ragged]
    token_bytes, row_bytes, prompt_bytes = _bytes_per_unit(info, wired.keys() - set(ragged))
    sizes = [part.num_tokens * token_bytes + part.num_rows * row_bytes + prompt_bytes for part in parts]
    rows = list(itertools.accumulate((part.num_rows for part in parts), initial=0))
    for name in ragged:
        bounds = _bounds(info.columns[name], (), rows)
        for index in range(len(parts)):
            values = wired[name][bounds[index] : bounds[index + 1]]
            sizes[index] += sum(map(_ragged_bytes, values))
    return sizes


def _ragged_bytes(value: Any) -> int:
    """Return the bytes of a ragged value's arrays; whether it is a list of arrays is checked later."""
    return sum(getattr(array, "nbytes", 0) for array in value) if isinstance(value, list | tuple) else 0


def _parts(meta: KVBatchMeta) -> list[Part]:
    """Return one part per run of consecutive samples of the same chunk."""
    parts = []
    for index, run in itertools.groupby(meta.rows, key=itemgetter(0)):
        chunk = meta.chunks[index]
        rows = tuple(map(itemgetter(1), run))
        if rows == tuple(range(len(chunk.lengths))):
            parts.append(Part(chunk.key, None, len(rows), sum(chunk.lengths)))
        else:
            parts.append(Part(chunk.key, rows, len(rows), sum([chunk.lengths[row] for row in rows])))
    return parts


def wants(missing: Mapping[str, Rows]) -> tuple[Want, ...]:
    """Return one want per set of missing rows, with all columns that miss these rows."""
    columns: dict[Rows, list[str]] = {}
    for name, rows in missing.items():
        if rows:
            columns.setdefault(rows, []).append(name)
    return tuple(Want(tuple(names), rows) for rows, names in columns.items())


def by_columns(segments: Sequence[Segment]) -> dict[tuple[str, ...], list[Segment]]:
    """Group segments that hold the same columns."""
    groups: dict[tuple[str, ...], list[Segment]] = {}
    for segment in segments:
        groups.setdefault(segment.columns, []).append(segment)
    return groups


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
    """Raise CorruptData unless rows and tokens of the segment's parts agree with the batch's ``chunks``."""
    for part in segment.parts:
        chunk = chunks.get(part.chunk)
        if chunk is not None:
            lengths: Sequence[int] = chunk.lengths
            if part.rows is not None:
                lengths = [lengths[row] for row in part.rows if row < len(lengths)]
            if len(lengths) != part.num_rows or sum(lengths) != part.num_tokens:
                raise CorruptData(
                    f"partition {info.name!r}, segment {segment.key!r}: chunk {part.chunk} was written with "
                    f"{part.num_rows} rows of {part.num_tokens} tokens, but the batch says "
                    f"{len(lengths)} rows of {sum(lengths)} tokens"
                )


def check_loaded(info: PartitionInfo, column: Column, segment: Segment, array: Any) -> None:
    """Raise CorruptData unless the loaded array has the dtype and the shape, or rows, that were stored."""
    where = f"partition {info.name!r}, column {column.name!r}, segment {segment.key!r}"
    num_rows = len(segment.parts) if column.per_prompt else sum(part.num_rows for part in segment.parts)
    if not isinstance(array, np.ndarray) or array.dtype != codec.wire_dtype(column):
        raise CorruptData(
            f"{where}: stored {codec.wire_dtype(column)}, got {getattr(array, 'dtype', type(array).__name__)}"
        )
    if not column.is_dense:
        if codec.num_packed_rows(array) != num_rows:
            raise CorruptData(f"{where}: stored {num_rows} rows, got {codec.num_packed_rows(array)}")
        return
    num_tokens = sum(part.num_tokens for part in segment.parts)
    expected = (num_tokens if column.layout is Layout.per_token else num_rows, *column.inner_shape)
    if array.shape != expected:
        raise CorruptData(f"{where}: stored shape {list(expected)}, got {list(array.shape)}")
