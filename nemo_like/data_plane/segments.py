"""Segments: what one storage key holds. Standard library only; these travel between processes.

A segment is written by one call and never changes: the values of some columns for some rows, each
column contiguous, rows in the order of ``parts``. It holds a chunk, or several small ones written
together, or those rows of a chunk that one worker had. Which segments make up a (chunk, column) is
known to the registry.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from nemo_like.data_plane.columns import Column

# (chunk, its rows; None: all of them, in order)
Rows = tuple[tuple[str, tuple[int, ...] | None], ...]


class Part(NamedTuple):
    """What a segment holds of one chunk."""

    chunk: str
    rows: tuple[int, ...] | None  # None: every row of the chunk, in order
    num_rows: int
    num_tokens: int


class Segment(NamedTuple):
    key: str  # unique within the run
    columns: tuple[str, ...]
    parts: tuple[Part, ...]  # in the order of their values
    address: Any = None  # what the storage said when it was saved and needs to load it


class PartitionInfo(NamedTuple):
    """What a process has to know of an open partition."""

    name: str
    storage_id: str  # the partition's name in storage, unique per opening
    columns: dict[str, Column]
    open_ids: frozenset[str]  # storage ids of every open partition
    has_capacity_limit: bool  # then a write reserves its bytes first
    num_readers: (
        int | None
    )  # processes that divide the samples among them as ``sharding`` does; None: unknown


class Want(NamedTuple):
    """Columns that a reader needs, each for the same rows."""

    columns: tuple[str, ...]
    rows: Rows


class Commit(NamedTuple):
    """Segments that are in storage and become readable together."""

    writer: str
    segments: tuple[Segment, ...]
    new_chunks: dict[str, int]  # chunk -> number of rows; empty when columns are added to existing samples


class Thinned(NamedTuple):
    """A segment of which some parts have no live row any more."""

    segment: Segment
    live_parts: tuple[int, ...]  # positions in ``segment.parts``


class Replacement(NamedTuple):
    """A stored segment that takes the place of another."""

    old_key: str
    segment: Segment
    num_bytes: int  # of its values


class Replaced(NamedTuple):
    """What follows from the replacement of segments."""

    obsolete: tuple[Segment, ...]  # that nothing refers to
    thinned: tuple[Thinned, ...]  # by samples cleared meanwhile


def split(items: Iterable[int], sizes: Iterable[int], segment_bytes: int) -> list[list[int]]:
    """Consecutive items grouped until a group reaches ``segment_bytes``; ``sizes`` are their bytes.

    Every key costs storage and controller about as much as 50 KB of values, so small chunks share one.
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
