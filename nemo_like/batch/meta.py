"""``KVBatchMeta``: all that the driver knows about a batch: keys, lengths, tags and a schedule, no tokens.

Standard library only, since the driver imports no tensor library.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from itertools import chain, islice
from operator import itemgetter
from typing import Any, NamedTuple, cast

from nemo_like.batch.columns import Column
from nemo_like.batch.tags import Tag, TagValue, V


@dataclass(frozen=True, slots=True)
class Chunk:
    """The samples of one group as they were put into the data plane; only the chunk has a key, not its rows.

    ``lengths`` has one entry for *every* row that was put, in order, even when a batch has only some of
    these rows: the rows' offsets inside the chunk's contiguous values follow from the lengths.
    """

    key: str
    lengths: tuple[int, ...]  # tokens per row, prompt and response together


class MicroBatchLayout(Enum):
    """How a micro-batch's samples lie in memory."""

    padded = "padded"  # [samples, padded_length], right-padded
    packed = "packed"  # [padded_length]: the samples end to end


class MicroBatch(NamedTuple):
    """The rows of one forward (and backward) pass on one data-parallel rank.

    It is a tuple rather than a dataclass because a step makes many of them.
    """

    rows: tuple[int, ...]  # positions within the shard's meta
    padded_length: int  # tokens: of each row, or of all rows end to end; the same on every rank
    # Layout packed: how many tokens each row begins with that the row before it begins with too, and that are
    # there once for both; () where none does.
    shared: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class GlobalBatch:
    """One update on one rank: the rank's micro-batches, and the *global* counts that normalise the loss."""

    num_samples: int  # over all ranks, sample_mask applied
    num_tokens: int  # response tokens over all ranks, sample_mask applied
    micro_batches: tuple[MicroBatch, ...]  # () where the gradients of all its samples were accumulated before

    @property
    def num_rows(self) -> int:
        """The number of rows in all micro-batches."""
        return sum(len(one.rows) for one in self.micro_batches)

    def unnormalised(self) -> GlobalBatch:
        """Return the same micro-batches with counts of 1, by which the loss is a sum instead of a mean."""
        return replace(self, num_samples=1, num_tokens=1)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The updates of a shard: each has micro-batches, which list rows of the shard.

    The driver makes it once, from lengths (and prompts, where samples share them); the workers follow it and
    never derive a schedule of their own.
    """

    global_batches: tuple[GlobalBatch, ...]
    layout: MicroBatchLayout = MicroBatchLayout.padded
    length_multiple: int = 1  # packed: every sample's length is rounded up to a multiple of this
    # Whether samples enter the model with their last tokens, so that the critic also values the final state.
    with_ends: bool = False

    def repeated(self, times: int) -> Schedule:
        """Return a schedule of ``times`` passes over the updates, each pass in the same order."""
        return replace(self, global_batches=self.global_batches * times)

    def without_first(self) -> Schedule:
        """Return a schedule whose first update has no micro-batches, since its samples were accumulated."""
        first, *others = self.global_batches
        return replace(self, global_batches=(replace(first, micro_batches=()), *others))

    def __reduce__(self) -> tuple[Any, ...]:
        # There are many micro-batches: pickling an object for each would cost more than its contents.
        micro_batches = [one for batch in self.global_batches for one in batch.micro_batches]
        counts = tuple(
            [(one.num_samples, one.num_tokens, len(one.micro_batches)) for one in self.global_batches]
        )
        padded_lengths = array("i", [one.padded_length for one in micro_batches]).tobytes()
        sizes = array("i", [len(one.rows) for one in micro_batches]).tobytes()
        rows = array("i", chain.from_iterable([one.rows for one in micro_batches])).tobytes()
        shared = array("i", chain.from_iterable([one.shared for one in micro_batches])).tobytes()
        return _restored_schedule, (
            counts,
            padded_lengths,
            sizes,
            rows,
            shared,
            self.layout,
            self.length_multiple,
            self.with_ends,
        )

    @property
    def num_microbatches(self) -> tuple[int, ...]:
        """The number of micro-batches in each update; equal on every rank."""
        return tuple(len(batch.micro_batches) for batch in self.global_batches)

    @property
    def num_rows(self) -> int:
        """The number of rows in all micro-batches of all updates."""
        return sum(batch.num_rows for batch in self.global_batches)

    @property
    def micro_batch_indices(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Row positions within the shard, as [update][micro-batch][row]."""
        return tuple(tuple(mb.rows for mb in batch.micro_batches) for batch in self.global_batches)


@dataclass(frozen=True, slots=True)
class KVBatchMeta:
    """The metadata of a batch of N samples: keys, lengths, tags and a schedule; never a token.

    ``rows[i] = (index into chunks, row in the chunk)`` says where sample i is. ``tags`` hold one small value
    per sample. ``columns`` are the names of the columns that can be fetched for every sample.

    Raises ValueError when rows or tags do not fit the chunks.
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
        self._check_tags(self.tags)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens per sample, prompt and response together."""
        lengths = [chunk.lengths for chunk in self.chunks]
        return tuple([lengths[chunk][row] for chunk, row in self.rows])

    @property
    def prompt_index(self) -> tuple[int, ...]:
        """The number of each sample's prompt; prompts are numbered from 0 as they first occur in the batch.

        A chunk is the group of one prompt, so samples of one chunk have the same number.
        """
        numbers: dict[int, int] = {}
        return tuple([numbers.setdefault(chunk, len(numbers)) for chunk, _ in self.rows])

    @property
    def occasion(self) -> str:
        """The partition's name in messages: "step 12" for "train-12", else the name itself."""
        kind, _, number = self.partition.partition("-")
        return f"step {number}" if kind == "train" and number.isdigit() else f"partition {self.partition!r}"

    @property
    def sample_ids(self) -> tuple[str, ...]:
        """One printable id per sample, ``chunk key/row``; error messages name samples by these."""
        return tuple(f"{self.chunks[chunk].key}/{row}" for chunk, row in self.rows)

    def tag(self, tag: Tag[V]) -> tuple[V, ...]:
        """Return the values of one tag, in sample order. Raises KeyError, which lists the existing tags."""
        if tag.name not in self.tags:
            raise KeyError(
                f"no tag {tag.name!r} on partition {self.partition!r}; there are {sorted(self.tags)}"
            )
        return cast("tuple[V, ...]", self.tags[tag.name])

    def has_tag(self, tag: Tag[Any]) -> bool:
        """Return whether the samples have this tag."""
        return tag.name in self.tags

    def with_tag(self, tag: Tag[V], values: Sequence[V]) -> KVBatchMeta:
        """Return a copy with this tag added or replaced; ``values`` has one value per sample.

        Raises ValueError for another number of values.
        """
        return self.with_tags({tag.name: values})

    def with_tags(self, tags: Mapping[str, Sequence[TagValue]]) -> KVBatchMeta:
        """Return a copy with these tags, by name, added or replaced.

        For tags that another process sent by name. Raises ValueError unless each has one value per sample.
        """
        added = {name: tuple(values) for name, values in tags.items()}
        self._check_tags(added)
        return self._with(tags={**self.tags, **added})

    def only_tags(self, *tags: Tag[Any]) -> KVBatchMeta:
        """Return a copy with these tags only. Raises KeyError when the batch lacks one of them."""
        return self._with(tags={tag.name: self.tag(tag) for tag in tags})

    def with_columns(self, *columns: Column) -> KVBatchMeta:
        """Return a copy that lists these columns too, after they were written for every sample."""
        return self._with(columns=self.columns | {column.name for column in columns})

    def with_schedule(self, schedule: Schedule | None) -> KVBatchMeta:
        return self._with(schedule=schedule)

    def subset(self, positions: Sequence[int]) -> KVBatchMeta:
        """Return the samples at these positions, in this order.

        The result has no schedule, because schedules are positional, and no chunk without rows. Raises
        ValueError when a position occurs twice.
        """
        if len(set(positions)) != len(positions):
            raise ValueError(f"partition {self.partition!r}: a sample occurs twice in the batch")
        pick = _picker(positions)
        rows = pick(self.rows)
        kept = list(dict.fromkeys([chunk for chunk, _ in rows]))
        if len(kept) != len(self.chunks) or kept != list(range(len(kept))):
            renumbered = {old: new for new, old in enumerate(kept)}
            rows = tuple([(renumbered[chunk], row) for chunk, row in rows])
        return self._with(
            chunks=tuple([self.chunks[chunk] for chunk in kept]),
            rows=rows,
            tags={name: pick(values) for name, values in self.tags.items()},
            schedule=None,
        )

    def slice(self, start: int, stop: int) -> KVBatchMeta:
        """Return samples [start, stop), as ``subset`` does. Raises ValueError when the batch is shorter."""
        if not 0 <= start <= stop <= len(self):
            raise ValueError(
                f"partition {self.partition!r}: no samples [{start}, {stop}) in a batch of {len(self)}"
            )
        return self.subset(range(start, stop))

    def select(self, keep: Sequence[TagValue]) -> KVBatchMeta:
        """Return the samples whose value in ``keep`` is true, e.g. ``meta.select(meta.tag(SAMPLE_MASK))``.

        The result has no schedule. Raises ValueError unless there is one value per sample.
        """
        if len(keep) != len(self):
            raise ValueError(f"select got {len(keep)} values for {len(self)} samples")
        if all(keep):
            return self.with_schedule(None)
        return self.subset([position for position, value in enumerate(keep) if value])

    @staticmethod
    def concat(metas: Sequence[KVBatchMeta]) -> KVBatchMeta:
        """Return one batch with the samples of all ``metas``, one after the other; it has no schedule.

        Raises ValueError when there is no meta; when partitions, columns or tag names differ; when two metas
        name the same stored chunk with different numbers of rows; or when a sample would occur twice.
        """
        if not metas:
            raise ValueError("concat needs at least one batch")
        first = metas[0]
        if len(metas) == 1:
            return first.with_schedule(None)
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

    def _check_tags(self, tags: Mapping[str, Sequence[TagValue]]) -> None:
        for name, values in tags.items():
            if len(values) != len(self.rows):
                raise ValueError(f"tag {name!r} has {len(values)} values for {len(self.rows)} samples")

    def _with(self, **changes: Any) -> KVBatchMeta:
        """Return a copy with ``changes``, unchecked: the caller knows that they are consistent."""
        parts = {name: getattr(self, name) for name in _META_FIELDS}
        return _unchecked(KVBatchMeta, {**parts, **changes})

    def __reduce__(self) -> tuple[Any, ...]:
        # Few objects: pickling every row and length by itself would cost more than their values.
        rows = array("i", chain.from_iterable(self.rows)).tobytes()
        keys = tuple([chunk.key for chunk in self.chunks])
        sizes = tuple([len(chunk.lengths) for chunk in self.chunks])
        lengths = array("i", chain.from_iterable([chunk.lengths for chunk in self.chunks])).tobytes()
        tags = {name: _packed(values) for name, values in self.tags.items()}
        return _restored, (self.partition, keys, sizes, lengths, rows, self.columns, tags, self.schedule)


_META_FIELDS = tuple(one.name for one in fields(KVBatchMeta))


def _unchecked(kind: type[KVBatchMeta], parts: Mapping[str, Any]) -> KVBatchMeta:
    meta = object.__new__(kind)
    for name, value in parts.items():
        object.__setattr__(meta, name, value)
    return meta


def _restored(
    partition: str,
    keys: tuple[str, ...],
    sizes: tuple[int, ...],
    lengths: bytes,
    rows: bytes,
    columns: frozenset[str],
    tags: Mapping[str, Any],
    schedule: Schedule | None,
) -> KVBatchMeta:
    """Rebuild the meta that ``__reduce__`` took apart."""
    of_chunks, numbers = iter(_integers(lengths)), iter(_integers(rows))
    chunks = tuple(
        [Chunk(key, tuple(islice(of_chunks, size))) for key, size in zip(keys, sizes, strict=True)]
    )
    parts = {
        "partition": partition,
        "chunks": chunks,
        "rows": tuple(zip(numbers, numbers, strict=True)),
        "columns": columns,
        "tags": {name: _unpacked(values) for name, values in tags.items()},
        "schedule": schedule,
    }
    return _unchecked(KVBatchMeta, parts)


def _restored_schedule(
    counts: tuple[tuple[int, int, int], ...],
    padded_lengths: bytes,
    sizes: bytes,
    rows: bytes,
    shared: bytes,
    layout: MicroBatchLayout,
    length_multiple: int,
    with_ends: bool,
) -> Schedule:
    numbers = iter(_integers(rows))
    of_shared = iter(_integers(shared))
    micro_batches = iter(
        [
            MicroBatch(tuple(islice(numbers, size)), padded_length, tuple(islice(of_shared, size)))
            for size, padded_length in zip(_integers(sizes), _integers(padded_lengths), strict=True)
        ]
    )
    batches = [
        GlobalBatch(num_samples, num_tokens, tuple(islice(micro_batches, count)))
        for num_samples, num_tokens, count in counts
    ]
    return Schedule(tuple(batches), layout, length_multiple, with_ends)


def _integers(data: bytes) -> array[int]:
    numbers = array("i")
    numbers.frombytes(data)
    return numbers


def _packed(values: tuple[TagValue, ...]) -> tuple[TagValue, ...] | bytes:
    """Return a tag's values as bytes if all are floats, and unchanged otherwise."""
    is_float = set(map(type, values)) == {float}
    return array("d", cast("tuple[float, ...]", values)).tobytes() if is_float else values


def _unpacked(values: tuple[TagValue, ...] | bytes) -> tuple[TagValue, ...]:
    if isinstance(values, tuple):
        return values
    numbers = array("d")
    numbers.frombytes(values)
    return tuple(numbers)


def _picker(positions: Sequence[int]) -> Callable[[tuple[Any, ...]], tuple[Any, ...]]:
    """Return a function that returns a tuple of the values at these positions."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda values: tuple([values[position] for position in positions])
