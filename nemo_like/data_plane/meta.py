"""``KVBatchMeta``: everything the driver knows about a batch, and all it ever carries.

Standard library only, since the driver imports no tensor library.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, cast

TagValue = float | int | bool | str


@dataclass(frozen=True, slots=True)
class Chunk:
    """A stored group of rows, the unit of storage. A key is a chunk, never a row.

    ``lengths`` are those of *all* rows the chunk was written with, in order, because the rows'
    offsets inside its contiguous values follow from them.
    """

    key: str
    lengths: tuple[int, ...]  # tokens per row, prompt and response together

    def __reduce__(self) -> tuple[type[Chunk], tuple[Any, ...]]:
        # There are many, and a dataclass with slots pickles slowly by itself.
        return Chunk, (self.key, self.lengths)


class MicroBatchLayout(Enum):
    """How a micro-batch's samples lie in memory."""

    padded = "padded"  # [samples, padded_length], right-padded
    packed = "packed"  # [padded_length]: the samples end to end


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Rows of one forward (and backward) on one data-parallel rank."""

    rows: tuple[int, ...]  # positions within the shard's meta
    padded_length: int  # tokens, of each row or of all end to end; the same on every rank

    def __reduce__(self) -> tuple[type[MicroBatch], tuple[Any, ...]]:
        # There are many, and a dataclass with slots pickles slowly by itself.
        return MicroBatch, (self.rows, self.padded_length)


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """One optimizer update: this rank's micro-batches and the *global* counts that normalise the loss."""

    num_samples: int  # over all ranks, sample_mask applied
    num_tokens: int  # response tokens over all ranks, sample_mask applied
    micro_batches: tuple[MicroBatch, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which rows make up which micro-batch. Made once, on lengths alone; workers never re-derive it."""

    global_batches: tuple[GlobalBatch, ...]
    layout: MicroBatchLayout = MicroBatchLayout.padded
    length_multiple: int = 1  # packed: a sample takes its tokens rounded up to a multiple of this

    def repeated(self, times: int) -> Schedule:
        """Every update ``times`` times over: one pass after the other, each in the same order."""
        return replace(self, global_batches=self.global_batches * times)

    @property
    def num_microbatches(self) -> tuple[int, ...]:
        """Micro-batches per optimizer update; equal on every rank."""
        return tuple(len(batch.micro_batches) for batch in self.global_batches)

    @property
    def global_batch_sizes(self) -> tuple[int, ...]:
        """Valid samples per optimizer update, over all ranks."""
        return tuple(batch.num_samples for batch in self.global_batches)

    @property
    def micro_batch_indices(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """[update][micro-batch][row position within the shard]."""
        return tuple(tuple(mb.rows for mb in batch.micro_batches) for batch in self.global_batches)


@dataclass(frozen=True, slots=True)
class KVBatchMeta:
    """Keys, lengths, tags and a schedule of N samples; never a token.

    ``rows[i] = (chunk index, row in the chunk)`` places sample i. ``tags`` hold one small scalar
    per sample. ``columns`` are the names that can be fetched for every sample.

    Raises ValueError when the parts are inconsistent.
    """

    partition: str
    chunks: tuple[Chunk, ...]
    rows: tuple[tuple[int, int], ...]
    columns: frozenset[str]
    tags: Mapping[str, tuple[TagValue, ...]] = field(default_factory=dict)
    schedule: Schedule | None = None

    def __post_init__(self) -> None:
        if len(set(self.rows)) != len(self.rows):
            raise ValueError(f"partition {self.partition!r}: a sample occurs twice in the batch")
        sizes = [len(chunk.lengths) for chunk in self.chunks]
        num_chunks = len(sizes)
        for chunk_index, row in self.rows:
            if not 0 <= chunk_index < num_chunks or not 0 <= row < sizes[chunk_index]:
                raise ValueError(f"partition {self.partition!r}: no row {row} in chunk {chunk_index}")
        for name, values in self.tags.items():
            if len(values) != len(self.rows):
                raise ValueError(f"tag {name!r} has {len(values)} values for {len(self.rows)} samples")

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens per sample, prompt and response together."""
        return tuple(self.chunks[chunk].lengths[row] for chunk, row in self.rows)

    @property
    def sample_ids(self) -> tuple[str, ...]:
        """Printable ids, ``chunk key/row``; they name samples in error messages."""
        return tuple(f"{self.chunks[chunk].key}/{row}" for chunk, row in self.rows)

    def tag(self, name: str) -> tuple[TagValue, ...]:
        """Values of one tag, in sample order. Raises KeyError that lists the tags there are."""
        if name not in self.tags:
            raise KeyError(f"no tag {name!r} on partition {self.partition!r}; there are {sorted(self.tags)}")
        return self.tags[name]

    def numbers(self, name: str) -> tuple[float, ...]:
        """A tag whose values are numbers. Raises TypeError when one is a text."""
        values = self.tag(name)
        if any(isinstance(value, str) for value in values):
            raise TypeError(f"tag {name!r} on partition {self.partition!r} holds texts, not numbers")
        return cast("tuple[float, ...]", values)

    def with_tags(self, **tags: Sequence[TagValue]) -> KVBatchMeta:
        """A copy with these tags added or replaced; each has one value per sample."""
        return replace(self, tags={**self.tags, **{name: tuple(values) for name, values in tags.items()}})

    def with_columns(self, *names: str) -> KVBatchMeta:
        """A copy that knows these columns were written for every one of its samples."""
        return replace(self, columns=self.columns | set(names))

    def with_schedule(self, schedule: Schedule | None) -> KVBatchMeta:
        return replace(self, schedule=schedule)

    def subset(self, positions: Sequence[int]) -> KVBatchMeta:
        """The samples at these positions, in this order; the schedule, being positional, is dropped.

        Chunks of which no row is left are dropped too.
        """
        rows = [self.rows[position] for position in positions]
        kept = list(dict.fromkeys(chunk for chunk, _ in rows))
        renumbered = {old: new for new, old in enumerate(kept)}
        return KVBatchMeta(
            partition=self.partition,
            chunks=tuple(self.chunks[chunk] for chunk in kept),
            rows=tuple((renumbered[chunk], row) for chunk, row in rows),
            columns=self.columns,
            tags={name: tuple(values[p] for p in positions) for name, values in self.tags.items()},
        )

    def slice(self, start: int, stop: int) -> KVBatchMeta:
        """Samples [start, stop), as ``subset``. Raises ValueError outside the batch."""
        if not 0 <= start <= stop <= len(self):
            raise ValueError(
                f"partition {self.partition!r}: no samples [{start}, {stop}) in a batch of {len(self)}"
            )
        return self.subset(range(start, stop))

    def select(self, keep: Sequence[TagValue]) -> KVBatchMeta:
        """The samples whose value in ``keep`` is true, e.g. ``meta.select(meta.tag("sample_mask"))``."""
        if len(keep) != len(self):
            raise ValueError(f"select got {len(keep)} values for {len(self)} samples")
        return self.subset([position for position, value in enumerate(keep) if value])

    @staticmethod
    def concat(metas: Sequence[KVBatchMeta]) -> KVBatchMeta:
        """Batches of one partition one after the other; the schedules are dropped.

        Raises ValueError when partition, columns or tag names differ, or a sample would occur twice.
        """
        if not metas:
            raise ValueError("concat needs at least one batch")
        first = metas[0]
        chunks: dict[str, Chunk] = {}
        for meta in metas:
            for what, mine, others in (
                ("partitions", meta.partition, first.partition),
                ("columns", sorted(meta.columns), sorted(first.columns)),
                ("tags", sorted(meta.tags), sorted(first.tags)),
            ):
                if mine != others:
                    raise ValueError(f"can't concat batches with different {what}: {others!r} and {mine!r}")
            for chunk in meta.chunks:
                if chunks.setdefault(chunk.key, chunk) != chunk:
                    raise ValueError(
                        f"chunk {chunk.key} of partition {first.partition!r} has two sets of lengths"
                    )
        index = {key: number for number, key in enumerate(chunks)}
        return KVBatchMeta(
            partition=first.partition,
            chunks=tuple(chunks.values()),
            rows=tuple((index[meta.chunks[chunk].key], row) for meta in metas for chunk, row in meta.rows),
            columns=first.columns,
            tags={name: tuple(value for meta in metas for value in meta.tags[name]) for name in first.tags},
        )
