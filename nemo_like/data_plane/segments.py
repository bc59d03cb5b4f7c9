"""Segments: what one storage key holds. Standard library only; these travel between processes.

A segment is written by one call and never changes: the values of some columns for some rows, each
column contiguous, rows in the order of ``parts``. It holds a chunk, several that one rank will read,
or those rows of a chunk that one worker had. Which segments make up a (chunk, column) is known to the
catalogue.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from nemo_like.batch.columns import Column

# (chunk, its rows; None: all of them, in order)
Rows = tuple[tuple[str, tuple[int, ...] | None], ...]


class Part(NamedTuple):
    """What a segment holds of one chunk."""

    chunk: str
    rows: tuple[int, ...] | None  # None: every row of the chunk, in order
    num_rows: int
    num_tokens: int


class Segment(NamedTuple):
    """One storage key and what lies under it."""

    key: str  # unique within the run
    columns: tuple[str, ...]
    parts: tuple[Part, ...]  # in the order of their values
    write: Any = None  # the storage's description of all keys that were saved together
    position: int = 0  # of this key among them


class PartitionInfo(NamedTuple):
    """What a process has to know of an open partition."""

    name: str
    storage_id: str  # the partition's name in storage, unique per opening
    columns: dict[str, Column]
    open_ids: frozenset[str]  # storage ids of every open partition
    num_readers: int | None  # ranks that share the samples as ``sharding`` divides them; None: unknown


class Want(NamedTuple):
    """Columns that a reader needs, each for the same rows."""

    columns: tuple[str, ...]
    rows: Rows


class Commit(NamedTuple):
    """Segments that are in storage and become readable together."""

    writer: str
    segments: tuple[Segment, ...]
    new_chunks: dict[str, int]  # chunk -> number of rows; empty when columns are added to existing samples


def at(segments: Sequence[Segment], write: Any) -> tuple[Segment, ...]:
    """Return segments that were saved together with the storage's description and their positions in it."""
    return tuple(
        [segment._replace(write=write, position=position) for position, segment in enumerate(segments)]
    )


def split(items: Iterable[int], sizes: Iterable[int], segment_bytes: int) -> list[list[int]]:
    """Group consecutive items until a group reaches ``segment_bytes``; ``sizes`` are their bytes."""
    groups: list[list[int]] = []
    filled = segment_bytes
    for item, size in zip(items, sizes, strict=True):
        if filled >= segment_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(item)
        filled += size
    return groups
