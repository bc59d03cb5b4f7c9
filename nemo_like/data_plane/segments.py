"""Segments, and the messages of processes about them. A segment is the content of one storage key.

One call writes a segment, which never changes: the values of some columns for some rows, each column
contiguous, rows in the order of ``pieces``. It holds a chunk, several chunks that one rank will read, or the
rows of chunks that one worker had. The catalogue knows which segments make up a (chunk, column).

Standard library only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from nemo_like.batch.columns import Column

# Rows of several chunks: (chunk, its rows), where None means all rows of the chunk, in order.
Rows = tuple[tuple[str, tuple[int, ...] | None], ...]


class SegmentPiece(NamedTuple):
    """The rows of one chunk that a segment holds."""

    chunk: str
    rows: tuple[int, ...] | None  # None: every row of the chunk, in order
    num_rows: int
    num_tokens: int


class Segment(NamedTuple):
    """One storage key, and the columns and rows that are stored under it."""

    key: str  # unique within the run
    columns: tuple[str, ...]
    pieces: tuple[SegmentPiece, ...]  # in the order of their values
    write: Any = None  # the storage's description of all keys that were reserved or saved together
    position: int = 0  # of this key among those


class PartitionInfo(NamedTuple):
    """The description of an open partition that clients need; the host's ``describe`` and ``locate`` return
    it."""

    name: str
    storage_id: str  # the partition's name in storage, unique per opening
    columns: dict[str, Column]
    open_ids: frozenset[str]  # storage ids of every open partition
    num_readers: int | None  # ranks that share the samples as ``sharding`` divides them; None: unknown


class Want(NamedTuple):
    """Columns that a reader asks the host to locate, all for the same rows."""

    columns: tuple[str, ...]
    rows: Rows


class Commit(NamedTuple):
    """What a writer tells the host: segments that are in storage, and become readable together."""

    writer: str
    segments: tuple[Segment, ...]
    new_chunks: dict[str, int]  # chunk -> number of rows; empty when columns are added to existing samples


def with_write(segments: Sequence[Segment], write: Any) -> tuple[Segment, ...]:
    """Return the segments with ``write``, the storage's description of all of them, and positions in it."""
    return tuple(
        [segment._replace(write=write, position=position) for position, segment in enumerate(segments)]
    )


def by_columns(segments: Sequence[Segment]) -> dict[tuple[str, ...], list[Segment]]:
    """Group segments that hold the same columns."""
    groups: dict[tuple[str, ...], list[Segment]] = {}
    for segment in segments:
        groups.setdefault(segment.columns, []).append(segment)
    return groups


def split_by_size(items: Iterable[int], sizes: Iterable[int], segment_bytes: int) -> list[list[int]]:
    """Return groups of consecutive items; a group that reaches ``segment_bytes`` takes no further item.

    ``sizes`` are the items' bytes.
    """
    groups: list[list[int]] = []
    filled = segment_bytes
    for item, size in zip(items, sizes, strict=True):
        if filled >= segment_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(item)
        filled += size
    return groups
