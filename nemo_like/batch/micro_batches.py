"""Strategies that cut each rank's samples into micro-batches, by their lengths. Standard library only.

A strategy gets the lengths of every rank's samples and returns, for every rank, the same number of
micro-batches, because a rank with fewer micro-batches would leave the other ranks waiting in a collective. A
micro-batch is a list of indices into the rank's samples. Every sample is in exactly one micro-batch, and none
is empty.

    fixed_size        at most ``size`` samples each, of similar length
    in_order          at most ``size`` samples each, in the order in which they come
    dynamic_batches   as many samples as the token budget holds once they are padded to the longest
    sequence_packing  as many samples as the token budget holds end to end, without padding
    PromptSharing     like sequence_packing, with each prompt once for all its samples: prompt_sharing.py
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple, Protocol, TypeVar

from nemo_like.batch.meta import MicroBatch, MicroBatchLayout
from nemo_like.batch.tags import TagValue


class Prompt(NamedTuple):
    """What a sample begins with, as far as micro-batches depend on it: samples of one group have it in
    common."""

    group: TagValue
    num_tokens: int


Bin = TypeVar("Bin")

Lengths = Sequence[Sequence[int]]  # [rank][sample] tokens that enter the model
Prompts = Sequence[Sequence[Prompt]]  # [rank][sample]
MicroBatches = list[list[list[int]]]  # [rank][micro-batch][index of a sample]


def model_length(num_tokens: int) -> int:
    """Return how many tokens of a sample enter the model: all but its last, which only gets predicted."""
    return num_tokens - 1 if num_tokens > 1 else num_tokens


class MicroBatching(Protocol):
    """A strategy that cuts the samples of every rank into micro-batches."""

    @property
    def layout(self) -> MicroBatchLayout: ...

    @property
    def length_multiple(self) -> int: ...

    @property
    def shares_prompts(self) -> bool: ...

    def micro_batches(self, lengths: Lengths, prompts: Prompts) -> list[list[MicroBatch]]:
        """Return each rank's micro-batches, [rank][number]; rows are indices into the rank's samples.

        ``prompts`` are read only where the strategy shares them.
        """


@dataclass(frozen=True, slots=True)
class Strategy:
    """A strategy that depends on lengths alone: ``cut`` returns the samples of each micro-batch.

    Where a parallel layout needs it, lengths are rounded up to a multiple of ``length_multiple``: each
    sample's length in layout packed, the micro-batch's length in layout padded.
    """

    cut: Callable[[Lengths], MicroBatches]
    layout: MicroBatchLayout = MicroBatchLayout.padded
    length_multiple: int = 1

    @property
    def shares_prompts(self) -> bool:
        return False

    def micro_batches(self, lengths: Lengths, prompts: Prompts = ()) -> list[list[MicroBatch]]:
        """Return each rank's micro-batches, [rank][number]; rows are indices into the rank's samples."""
        cut = self.cut(lengths)
        common = self.common_lengths(lengths, cut)
        return [
            [MicroBatch(tuple(indices), length) for indices, length in zip(of_rank, common, strict=True)]
            for of_rank in cut
        ]

    def common_lengths(self, lengths: Lengths, cut: MicroBatches) -> list[int]:
        """Return the padded length of each micro-batch, in tokens: the most that any rank needs.

        ``cut`` is what ``self.cut(lengths)`` returned.
        """
        multiple = self.length_multiple
        take: Callable[[list[int]], int] = max
        if self.layout is MicroBatchLayout.packed:
            lengths, take = [[round_up(length, multiple) for length in rank] for rank in lengths], sum
        needed = [
            [take([of_rank[index] for index in indices]) for indices in of_number]
            for of_rank, of_number in zip(lengths, cut, strict=True)
        ]
        return [max(multiple, round_up(max(of_ranks), multiple)) for of_ranks in zip(*needed, strict=True)]


def fixed_size(size: int, length_multiple: int = 1) -> Strategy:
    """Return the strategy of at most ``size`` samples per micro-batch, longest samples first.

    Little is padded then, since micro-batches that run at the same time have similar lengths on all ranks.
    Raises ValueError when ``size`` is below 1.
    """
    return _of_size(size, length_multiple, longest_first)


def in_order(size: int, length_multiple: int = 1) -> Strategy:
    """Return the strategy of at most ``size`` consecutive samples per micro-batch, padded to the longest.

    Raises ValueError when ``size`` is below 1.
    """
    return _of_size(size, length_multiple, lambda lengths: list(range(len(lengths))))


def _of_size(size: int, length_multiple: int, order: Callable[[Sequence[int]], list[int]]) -> Strategy:
    if size < 1:
        raise ValueError(f"micro_batch_size={size} must be at least 1")

    def cut(lengths: Lengths) -> MicroBatches:
        count = max(-(-len(rank) // size) for rank in lengths)
        return [_cut_evenly(order(rank), count) for rank in lengths]

    return Strategy(cut, length_multiple=length_multiple)


def dynamic_batches(max_tokens: int, length_multiple: int = 1) -> Strategy:
    """Return the strategy of at most ``max_tokens`` per micro-batch, padding included, with similar lengths.

    Samples are taken longest first. A micro-batch takes samples while count x longest is at most
    ``max_tokens``; "longest" is the longest sample on any rank, rounded up to a multiple of
    ``length_multiple``. Every rank is cut after the same numbers of samples.

    The strategy raises ValueError when the longest sample alone is over the budget, or when the ranks have
    different numbers of samples.
    """

    def cut(lengths: Lengths) -> MicroBatches:
        _check_budget(lengths, max_tokens, length_multiple)
        if len({len(rank) for rank in lengths}) != 1:
            raise ValueError(
                f"the ranks have different numbers of samples: {[len(rank) for rank in lengths]}"
            )
        orders = [longest_first(rank) for rank in lengths]
        longest = [
            max(
                round_up(rank[order[position]], length_multiple)
                for rank, order in zip(lengths, orders, strict=True)
            )
            for position in range(len(orders[0]))
        ]
        bounds = [0]
        for position in range(len(longest)):
            # Samples are sorted longest first: the first of a micro-batch sets its length.
            if (position + 1 - bounds[-1]) * longest[bounds[-1]] > max_tokens:
                bounds.append(position)
        bounds.append(len(longest))
        return [
            [order[start:stop] for start, stop in itertools.pairwise(bounds) if stop > start]
            for order in orders
        ]

    return Strategy(cut, length_multiple=length_multiple)


def sequence_packing(max_tokens: int, length_multiple: int = 1) -> Strategy:
    """Return the strategy that packs samples end to end into micro-batches of at most ``max_tokens``.

    It makes few micro-batches, and the same number on every rank. Each sample counts with its length rounded
    up to a multiple of ``length_multiple``.

    The strategy raises ValueError when the longest sample alone is over the budget, or when a rank has fewer
    samples than another rank needs micro-batches.
    """

    def cut(lengths: Lengths) -> MicroBatches:
        _check_budget(lengths, max_tokens, length_multiple)
        rounded = [[round_up(length, length_multiple) for length in rank] for rank in lengths]
        bins = [pack(rank, max_tokens) for rank in rounded]
        count = max(len(of_rank) for of_rank in bins)
        # Heaviest first on every rank: micro-batches that run at the same time then take about as long.
        return [
            _heaviest_first(_split_to(count, of_rank, rank), rank)
            for of_rank, rank in zip(bins, rounded, strict=True)
        ]

    return Strategy(cut, MicroBatchLayout.packed, length_multiple)


def _heaviest_first(groups: list[list[int]], sizes: Sequence[int]) -> list[list[int]]:
    return sorted(groups, key=lambda indices: (-sum(sizes[i] for i in indices), indices))


def pack(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Pack indices of ``sizes`` into bins of at most ``capacity``, by modified first-fit decreasing.

    Every item over half of the capacity opens a bin. Each of these bins that has room for an item over a
    third of the capacity gets such an item; each other bin gets a pair of items, the smaller over a sixth,
    where a pair fits. Then every bin is filled with whatever still fits, largest first. The remaining items
    go first-fit decreasing into new bins. There are never more than 71/60 of the least possible number of
    bins, plus one.
    """
    order = longest_first(sizes)
    large = [index for index in order if 2 * sizes[index] > capacity]
    rest = _Descending([index for index in order if 2 * sizes[index] <= capacity], sizes)
    bins = [[index] for index in large]
    room = [capacity - sizes[index] for index in large]

    def put(position: int, index: int) -> None:
        bins[position].append(index)
        room[position] -= sizes[index]

    for position in range(len(bins)):
        medium = rest.largest_within(room[position], above=capacity / 3)
        if medium is not None:
            put(position, rest.take(medium))
    for position in reversed(range(len(bins))):
        if len(bins[position]) == 1:
            _put_pair(rest, position, room, put, capacity / 6)
    for position in range(len(bins)):
        while (fitting := rest.largest_within(room[position])) is not None:
            put(position, rest.take(fitting))
    left = rest.left()
    opened = _FirstFit(len(left), capacity)
    for index in left:
        position = len(large) + opened.put(sizes[index])
        if position == len(bins):
            bins.append([])
        bins[position].append(index)
    return bins


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class _Descending:
    """Items sorted by size, largest first, that can be taken one by one.

    An item keeps its position among all items when other items are taken.
    """

    def __init__(self, items: list[int], sizes: Sequence[int]) -> None:
        self._items = items
        self._negative = [-sizes[index] for index in items]
        # From each position, links lead to the nearest free position, onward or back: a free position links
        # to itself, a taken position to its neighbour. In _back, position p has index p + 1, and 0 means
        # none.
        self._onward = list(range(len(items) + 1))
        self._back = list(range(len(items) + 1))

    def left(self) -> list[int]:
        """Return the items that no bin has taken yet, largest first."""
        return [item for position, item in enumerate(self._items) if self._onward[position] == position]

    def largest_within(self, limit: int, above: float = -1.0) -> int | None:
        """Return the position of the largest item of at most ``limit``.

        Returns None when there is no such item, or when that item is not more than ``above``.
        """
        position = _followed(self._onward, bisect_left(self._negative, -limit))
        return position if position < len(self._items) and self.size(position) > above else None

    def smallest_above(self, limit: float) -> int | None:
        """Return the position of the smallest item of more than ``limit``; None when there is none."""
        return self.before(bisect_left(self._negative, -limit))

    def before(self, position: int) -> int | None:
        """Return the nearest free position before ``position``; None when there is none."""
        found = _followed(self._back, position)
        return found - 1 if found else None

    def size(self, position: int) -> int:
        return -self._negative[position]

    def take(self, position: int) -> int:
        self._onward[position] = position + 1
        self._back[position + 1] = position
        return self._items[position]


def _followed(links: list[int], position: int) -> int:
    """Follow the links from ``position`` to their end and return it.

    Links are shortened on the way, so that following them takes next to constant time on average.
    """
    while links[position] != position:
        links[position] = position = links[links[position]]
    return position


class _FirstFit:
    """Bins in a row; each item goes into the first bin with room for it.

    A binary tree, whose leaves are the bins and whose nodes hold the most room of any bin below them,
    finds that bin in logarithmic time.
    """

    def __init__(self, max_bins: int, capacity: int) -> None:
        self._num_leaves = 1 << max(0, max_bins - 1).bit_length()
        self._most_room = [capacity] * (2 * self._num_leaves)

    def put(self, size: int) -> int:
        """Put an item into the first bin with room for it, and return the bin's number."""
        most_room, node = self._most_room, 1
        while node < self._num_leaves:
            node *= 2
            if most_room[node] < size:
                node += 1
        position = node - self._num_leaves
        room = most_room[node] - size
        while node and most_room[node] != room:
            most_room[node] = room
            room = max(room, most_room[node ^ 1])  # what the parent now has: the larger of its two nodes
            node //= 2
        return position


def _put_pair(
    rest: _Descending, position: int, room: Sequence[int], put: Callable[[int, int], None], above: float
) -> None:
    """Put two items larger than ``above`` into the bin at ``position``, if two such items fit.

    It puts the smallest such item, and the largest other item that fits beside it.
    """
    smallest = rest.smallest_above(above)
    next_larger = None if smallest is None else rest.before(smallest)
    if smallest is None or next_larger is None:
        return
    if rest.size(smallest) + rest.size(next_larger) > room[position]:
        return
    left = room[position] - rest.size(smallest)
    put(position, rest.take(smallest))
    partner = rest.largest_within(left)
    assert partner is not None
    put(position, rest.take(partner))


def split_to(
    count: int,
    bins: Sequence[Bin],
    *,
    weight: Callable[[Bin], int],
    num_samples: Callable[[Bin], int],
    halves: Callable[[Bin], tuple[Bin, Bin]],
) -> list[Bin]:
    """Cut bins in two until there are ``count``, always the heaviest bin that has at least two samples.

    Among equally heavy bins the first is cut; halves go behind all other bins. Raises ValueError when no bin
    with two samples is left.
    """
    numbered = dict(enumerate(bins))
    heaviest = [(-weight(one), number) for number, one in numbered.items() if num_samples(one) > 1]
    heapify(heaviest)
    numbers = itertools.count(len(bins))
    while len(numbered) < count:
        if not heaviest:
            raise ValueError(f"{len(numbered)} samples can't fill {count} micro-batches")
        _, cut = heappop(heaviest)
        for half in halves(numbered.pop(cut)):
            number = next(numbers)
            numbered[number] = half
            if num_samples(half) > 1:
                heappush(heaviest, (-weight(half), number))
    return list(numbered.values())


def _split_to(count: int, bins: list[list[int]], sizes: Sequence[int]) -> list[list[int]]:
    """Split bins until there are ``count``; the halves of a bin take its samples in turns, largest first."""

    def halves(indices: list[int]) -> tuple[list[int], list[int]]:
        ordered = sorted(indices, key=lambda index: (-sizes[index], index))
        return ordered[0::2], ordered[1::2]

    def weight(indices: list[int]) -> int:
        return sum([sizes[index] for index in indices])

    return split_to(count, bins, weight=weight, num_samples=len, halves=halves)


def _check_budget(lengths: Lengths, max_tokens: int, length_multiple: int) -> None:
    longest = max(max(rank, default=0) for rank in lengths)
    if round_up(longest, length_multiple) > max_tokens:
        raise ValueError(
            f"a sample of {longest} tokens, rounded up to a multiple of {length_multiple}, is over the "
            f"micro-batch's budget of {max_tokens} tokens; raise the budget to at least "
            f"{round_up(longest, length_multiple)}"
        )


def longest_first(lengths: Sequence[int]) -> list[int]:
    """Return the indices by length, longest first; equal lengths keep their order."""
    # Sorting is stable, also in reverse.
    return sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)


def _cut_evenly(indices: list[int], count: int) -> list[list[int]]:
    """Cut ``indices`` into ``count`` consecutive pieces whose sizes differ by at most one.

    Raises ValueError when there are fewer indices than pieces.
    """
    if len(indices) < count:
        raise ValueError(f"{len(indices)} samples can't fill {count} micro-batches")
    bounds = [len(indices) * group // count for group in range(count + 1)]
    return [indices[bounds[group] : bounds[group + 1]] for group in range(count)]
