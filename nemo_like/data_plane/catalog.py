"""The catalogue knows which partitions are open, which segment holds which values, and who wrote it.

One catalogue serves all processes of a run. It lives in the host, whose event loop makes one call at a time.
Values never pass through it. Standard library only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from nemo_like.batch.columns import Column
from nemo_like.data_plane.capacity import Capacity
from nemo_like.data_plane.segments import (
    Commit,
    PartitionInfo,
    Rows,
    Segment,
    SegmentPiece,
    Want,
)
from nemo_like.data_plane.storage_errors import (
    DuplicateWrite,
    MissingData,
    PartitionExists,
    TooManyPartitions,
    UnknownColumn,
    UnknownPartition,
    UnknownSamples,
    listed,
)


@dataclass(slots=True)
class _StoredSegment:
    segment: Segment
    writer: str
    live_rows: int  # at 0 the segment can be freed


@dataclass(slots=True)
class _ChunkState:
    num_rows: int
    cleared: set[int] = field(default_factory=set)
    whole: dict[str, str] = field(default_factory=dict)  # column -> segment with every row
    partial: dict[str, dict[int, str]] = field(default_factory=dict)  # column -> row -> segment

    def is_begun(self, column: str) -> bool:
        """Return whether any row of the column was written."""
        return column in self.whole or bool(self.partial.get(column))

    def segment_of(self, column: str, row: int) -> str | None:
        return self.whole.get(column) or self.partial.get(column, {}).get(row)


@dataclass(slots=True)
class _Partition:
    name: str
    storage_id: str
    columns: dict[str, Column]
    num_readers: int | None
    opened_s: float
    chunks: dict[str, _ChunkState] = field(default_factory=dict)
    segments: dict[str, _StoredSegment] = field(default_factory=dict)


class Catalog:
    """The open partitions of one run, at most ``max_open_partitions`` at a time (None: any number)."""

    def __init__(
        self,
        run_id: str,
        capacity: Capacity,
        max_open_partitions: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.capacity = capacity
        self._run_id = run_id
        self._max_open = max_open_partitions
        self._clock = clock
        self._open: dict[str, _Partition] = {}
        self._num_opened = 0

    def open(self, name: str, columns: Sequence[Column], num_readers: int | None = None) -> bool:
        """Open a partition and return True; while ``max_open_partitions`` are open, return False.

        Raises PartitionExists, or ValueError when a column is declared twice.
        """
        if name in self._open:
            raise PartitionExists(f"partition {name!r} is open already; close it first or take another name")
        by_name = {column.name: column for column in columns}
        if len(by_name) != len(columns):
            raise ValueError(f"partition {name!r} declares a column twice: {[c.name for c in columns]}")
        if self._max_open is not None and len(self._open) >= self._max_open:
            return False
        self._num_opened += 1
        storage_id = f"{self._run_id}/{name}/{self._num_opened}"
        self._open[name] = _Partition(name, storage_id, by_name, num_readers, self._clock())
        return True

    def too_many(self, name: str, waited_s: float) -> TooManyPartitions:
        """Return the error for an opening that waited too long; it says which partitions are open, since
        when."""
        now = self._clock()
        ages = [f"{one.name!r} for {now - one.opened_s:.1f} s" for one in self._open.values()]
        return TooManyPartitions(
            f"partition {name!r} could not be opened within {waited_s:g} s: "
            f"data_plane.max_open_partitions={self._max_open} are open, {listed(ages)}. Their consumers are "
            "behind, or nobody closes them"
        )

    def close(self, name: str) -> str | None:
        """Close a partition and return its storage id, or None when it was not open."""
        partition = self._open.pop(name, None)
        return partition.storage_id if partition else None

    def describe(self, name: str) -> PartitionInfo:
        """Return the description of an open partition that clients need. Raises UnknownPartition."""
        if name not in self._open:
            raise UnknownPartition(
                f"partition {name!r} is not open; open are: {listed(sorted(self._open)) or 'none'}"
            )
        partition = self._open[name]
        open_ids = frozenset(one.storage_id for one in self._open.values())
        return PartitionInfo(
            name,
            partition.storage_id,
            partition.columns,
            open_ids,
            partition.num_readers,
        )

    def reserve(self, name: str, storage_id: str, sizes: Mapping[str, int]) -> None:
        """Reserve room for keys that are about to be saved; ``sizes`` are their bytes.

        Raises UnknownPartition or CapacityExceeded.
        """
        self._get(name, storage_id)
        self.capacity.reserve(name, storage_id, sizes)

    def commit(self, name: str, storage_id: str, commit: Commit) -> None:
        """Make saved segments readable, all or none.

        Raises UnknownPartition, UnknownColumn, UnknownSamples or DuplicateWrite, and then nothing changed.
        """
        partition = self._get(name, storage_id)
        self._check_commit(partition, commit)
        for chunk, num_rows in commit.new_chunks.items():
            partition.chunks[chunk] = _ChunkState(num_rows)
        for segment in commit.segments:
            rows = sum(piece.num_rows for piece in segment.pieces)
            partition.segments[segment.key] = _StoredSegment(segment, commit.writer, rows)
            self._record(partition, segment)

    def locate(self, name: str, storage_id: str, wants: Sequence[Want]) -> list[Segment] | None:
        """Return the segments that hold all wanted values, or None while any value is not written.

        Each segment names only the columns to load from it. Raises UnknownPartition, UnknownColumn, or
        UnknownSamples for rows that were never put or have been cleared.
        """
        partition = self._get(name, storage_id)
        keys: dict[str, dict[str, None]] = {}
        for want in wants:
            self._check_columns(partition, want.columns)
            for chunk, rows in want.rows:
                state = self._chunk(partition, chunk, rows)
                for column in want.columns:
                    for key in self._segments_of(state, column, rows):
                        if key is None:
                            return None
                        keys.setdefault(key, {})[column] = None
        return [
            partition.segments[key].segment._replace(columns=tuple(columns)) for key, columns in keys.items()
        ]

    def missing(self, name: str, storage_id: str, wants: Sequence[Want], waited_s: float) -> MissingData:
        """Return the error for a wait that expired; it names the missing columns, their writers and
        samples."""
        partition = self._get(name, storage_id)
        gaps: dict[str, list[str]] = {}
        for want in wants:
            for chunk, rows in want.rows:
                state = partition.chunks[chunk]
                for column in want.columns:
                    for row in range(state.num_rows) if rows is None else rows:
                        if state.segment_of(column, row) is None:
                            gaps.setdefault(column, []).append(f"{chunk}/{row}")
        text = "; ".join(
            f"column {column!r}, to be written by {partition.columns[column].writer!r}, "
            f"of samples {listed(samples)}"
            for column, samples in gaps.items()
        )
        return MissingData(f"partition {name!r}: not written within {waited_s:g} s: {text}")

    def clear(self, name: str, storage_id: str, rows: Rows) -> list[Segment]:
        """Clear rows, and return the segments that have no row left.

        Raises UnknownPartition, or UnknownSamples for rows that were never put or have been cleared.
        """
        partition = self._get(name, storage_id)
        states = [(self._chunk(partition, chunk, of_chunk), of_chunk) for chunk, of_chunk in rows]
        touched: dict[str, None] = {}
        for state, of_chunk in states:
            for row in range(state.num_rows) if of_chunk is None else of_chunk:
                state.cleared.add(row)
                columns = (*state.whole, *state.partial)
                for key in {state.segment_of(column, row) for column in columns} - {None}:
                    partition.segments[str(key)].live_rows -= 1
                    touched[str(key)] = None
        dead = [key for key in touched if partition.segments[key].live_rows == 0]
        return [partition.segments.pop(key).segment for key in dead]

    @staticmethod
    def _record(partition: _Partition, segment: Segment) -> None:
        """Record for each (chunk, column) of the segment that this segment holds its rows."""
        for piece in segment.pieces:
            state = partition.chunks[piece.chunk]
            for column in segment.columns:
                if piece.rows is None:
                    state.whole[column] = segment.key
                else:
                    state.partial.setdefault(column, {}).update(dict.fromkeys(piece.rows, segment.key))

    def _get(self, name: str, storage_id: str) -> _Partition:
        partition = self._open.get(name)
        if partition is None or partition.storage_id != storage_id:
            raise UnknownPartition(f"partition {name!r} was closed")
        return partition

    def _check_columns(self, partition: _Partition, columns: Iterable[str]) -> None:
        unknown = [repr(column) for column in columns if column not in partition.columns]
        if unknown:
            raise UnknownColumn(
                f"partition {partition.name!r} has no column {listed(unknown)}; declared are: "
                f"{listed(sorted(partition.columns))}"
            )

    def _chunk(self, partition: _Partition, chunk: str, rows: tuple[int, ...] | None) -> _ChunkState:
        """Return a chunk's state.

        Raises UnknownSamples when the chunk was never put, or any of ``rows`` was cleared.
        """
        state = partition.chunks.get(chunk)
        if state is None:
            raise UnknownSamples(f"partition {partition.name!r} has no chunk {chunk!r}")
        if rows is None and not state.cleared:
            return state
        wanted = range(state.num_rows) if rows is None else rows
        gone = [row for row in wanted if row in state.cleared or not 0 <= row < state.num_rows]
        if gone:
            samples = listed([f"{chunk}/{row}" for row in gone])
            raise UnknownSamples(f"partition {partition.name!r}: samples {samples} were cleared")
        return state

    @staticmethod
    def _segments_of(state: _ChunkState, column: str, rows: tuple[int, ...] | None) -> Iterable[str | None]:
        if column in state.whole:
            return (state.whole[column],)
        written = state.partial.get(column, {})
        wanted = range(state.num_rows) if rows is None else rows
        return dict.fromkeys(written.get(row) for row in wanted)

    def _check_commit(self, partition: _Partition, commit: Commit) -> None:
        for chunk in commit.new_chunks:
            if chunk in partition.chunks:
                raise DuplicateWrite(f"partition {partition.name!r} has chunk {chunk!r} already")
        for segment in commit.segments:
            self._check_columns(partition, segment.columns)
            for piece in segment.pieces:
                if piece.chunk in commit.new_chunks:
                    continue
                state = self._chunk(partition, piece.chunk, piece.rows)
                for column in segment.columns:
                    self._check_unwritten(partition, piece, state, column)

    def _check_unwritten(
        self, partition: _Partition, piece: SegmentPiece, state: _ChunkState, column: str
    ) -> None:
        if not state.is_begun(column):
            return
        for row in range(state.num_rows) if piece.rows is None else piece.rows:
            key = state.segment_of(column, row)
            if key is not None:
                raise DuplicateWrite(
                    f"partition {partition.name!r}: column {column!r} of sample {piece.chunk}/{row} was "
                    f"written already, by {partition.segments[key].writer}; only the leader of a replica "
                    "writes, and once"
                )
