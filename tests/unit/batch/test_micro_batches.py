"""Micro-batches: every sample exactly once, budgets kept, equally many on every rank, few of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.batch.meta import Chunk, KVBatchMeta, MicroBatchLayout
from nemo_like.batch.micro_batches import (
    Strategy,
    dynamic_batches,
    fixed_size,
    in_order,
    model_length,
    pack,
    round_up,
    sequence_packing,
    split_to,
)
from nemo_like.batch.sharding import shard_for_logprobs, shard_for_training

BUDGET = 60


@st.composite
def lengths_of_ranks(draw: st.DrawFn) -> list[list[int]]:
    num_ranks, num_samples = draw(st.integers(1, 4)), draw(st.integers(1, 20))
    one = st.lists(st.integers(1, 40), min_size=num_samples, max_size=num_samples)
    return [draw(one) for _ in range(num_ranks)]


@settings(max_examples=200)
@given(lengths_of_ranks(), st.sampled_from([1, 4, 8]), st.integers(0, 3))
def test_every_sample_is_in_one_micro_batch_and_ranks_have_equally_many(
    lengths: list[list[int]], multiple: int, kind: int
) -> None:
    strategies = (
        fixed_size(3),
        in_order(3),
        dynamic_batches(BUDGET, multiple),
        sequence_packing(BUDGET, multiple),
    )
    strategy = strategies[kind]
    cut = strategy.cut(lengths)
    assert len({len(of_rank) for of_rank in cut}) == 1
    for of_rank, mine in zip(cut, lengths, strict=True):
        assert sorted(itertools.chain(*of_rank)) == list(range(len(mine)))
        assert all(of_rank)


@settings(max_examples=200)
@given(lengths_of_ranks(), st.sampled_from([1, 4, 8]))
def test_dynamic_batches_keep_the_budget_with_the_padding_of_all_ranks(
    lengths: list[list[int]], multiple: int
) -> None:
    strategy = dynamic_batches(BUDGET, multiple)
    cut = strategy.cut(lengths)
    for number, length in enumerate(strategy.common_lengths(lengths, cut)):
        together = [[mine[i] for i in of_rank[number]] for of_rank, mine in zip(cut, lengths, strict=True)]
        assert length >= max(itertools.chain(*together))
        assert length % multiple == 0
        assert len({len(of_rank) for of_rank in together}) == 1
        assert len(together[0]) * length <= BUDGET


@settings(max_examples=200)
@given(lengths_of_ranks(), st.sampled_from([1, 4, 8]))
def test_packed_bins_keep_the_budget(lengths: list[list[int]], multiple: int) -> None:
    strategy = sequence_packing(BUDGET, multiple)
    budget = BUDGET // multiple * multiple
    cut = strategy.cut(lengths)
    common = strategy.common_lengths(lengths, cut)
    assert max(common) <= budget
    for of_rank, mine in zip(cut, lengths, strict=True):
        for indices, length in zip(of_rank, common, strict=True):
            assert sum(round_up(mine[i], multiple) for i in indices) <= length


def fewest_bins(sizes: Sequence[int], capacity: int) -> int:
    """By trying everything."""
    best = len(sizes)

    def place(index: int, bins: list[int]) -> None:
        nonlocal best
        if len(bins) >= best:
            return
        if index == len(sizes):
            best = len(bins)
            return
        for number in range(len(bins)):
            if bins[number] + sizes[index] <= capacity:
                bins[number] += sizes[index]
                place(index + 1, bins)
                bins[number] -= sizes[index]
        place(index + 1, [*bins, sizes[index]])

    place(0, [])
    return best


@settings(max_examples=150)
@given(st.lists(st.integers(1, 30), min_size=1, max_size=9))
def test_packing_takes_at_most_71_60ths_of_the_fewest_bins_and_one(sizes: list[int]) -> None:
    bins = pack(sizes, 30)
    assert sorted(itertools.chain(*bins)) == list(range(len(sizes)))
    assert all(sum(sizes[i] for i in indices) <= 30 for indices in bins)
    assert len(bins) <= 71 / 60 * fewest_bins(sizes, 30) + 1


def test_packing_fills_large_with_medium_and_small() -> None:
    """By hand, capacity 12: 7+5, 7+3+2, and what is left, 5 + 4."""
    bins = pack([7, 5, 3, 7, 2, 5, 4], 12)
    assert [sorted([7, 5, 3, 7, 2, 5, 4][i] for i in indices) for indices in bins] == [
        [5, 7],
        [5, 7],
        [2, 3, 4],
    ]
    bins = pack([7, 3, 2, 7, 5], 12)
    assert [[[7, 3, 2, 7, 5][i] for i in indices] for indices in bins] == [[7, 5], [7, 3, 2]]


def test_a_half_empty_bin_gets_the_smallest_of_the_small_with_the_largest_beside_it() -> None:
    """Capacity 30: beside 16 there is room for 14, which 6 and 8 fill."""
    assert pack([16, 6, 7, 8], 30) == [[0, 1, 3], [2]]


def test_what_fits_beside_nothing_large_goes_into_the_first_bin_with_room() -> None:
    """Capacity 10, largest first: 5 and 4 leave room for 1 in the first bin, 4, 3 and 3 fill the second, and
    the 1 goes back to the first."""
    assert pack([5, 4, 4, 3, 3, 1], 10) == [[0, 1, 5], [2, 3, 4]]


def test_dynamic_batches_by_hand() -> None:
    """Longest over both ranks: 8, 4, 4, 2. A budget of 8 holds one of 8, two of 4, or the one of 2."""
    assert dynamic_batches(8).cut([[4, 8, 2, 1], [3, 2, 4, 4]]) == [[[1], [0, 2], [3]], [[2], [3, 0], [1]]]


def test_micro_batches_of_fixed_size_by_hand() -> None:
    lengths = [[3, 9, 4, 8, 1]]
    assert fixed_size(2).cut(lengths) == [[[1], [3, 2], [0, 4]]]
    assert in_order(2).cut(lengths) == [[[0], [1, 2], [3, 4]]]


def test_a_rank_with_fewer_bins_splits_its_fullest() -> None:
    """Rank 0 packs 5+5 and 5+5, rank 1 needs four bins."""
    cut = sequence_packing(10).cut([[5, 5, 5, 5], [9, 9, 9, 9]])
    assert [len(of_rank) for of_rank in cut] == [4, 4]


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        (3, ["aaaa", "bb", "cccc"]),
        (4, ["bb", "cccc", "aa", "aa"]),
        (5, ["bb", "aa", "aa", "cc", "cc"]),
        (6, ["aa", "aa", "cc", "cc", "b", "b"]),
    ],
)
def test_of_equally_full_bins_the_first_is_cut_and_its_halves_go_last(
    count: int, expected: list[str]
) -> None:
    def halves(letters: str) -> tuple[str, str]:
        return letters[: len(letters) // 2], letters[len(letters) // 2 :]

    bins = ["aaaa", "bb", "cccc"]
    assert split_to(count, bins, weight=len, num_samples=len, halves=halves) == expected


@pytest.mark.parametrize("strategy", [dynamic_batches(16, 8), sequence_packing(16, 8)])
def test_a_sample_over_the_budget_is_refused(strategy: Strategy) -> None:
    with pytest.raises(ValueError, match=r"a sample of 17 tokens.*raise the budget to at least 24"):
        strategy.cut([[3, 17]])


def test_ranks_with_too_few_samples_are_refused() -> None:
    with pytest.raises(ValueError, match="different numbers of samples"):
        dynamic_batches(10).cut([[1, 2], [1]])
    with pytest.raises(ValueError, match="can't fill 2 micro-batches"):
        sequence_packing(10).cut([[9, 9], [1]])


@pytest.mark.parametrize("shard_for", [shard_for_training, shard_for_logprobs])
@pytest.mark.parametrize("layout", [MicroBatchLayout.padded, MicroBatchLayout.packed])
def test_a_strategys_micro_batches_travel_with_the_shards(
    shard_for: Callable[..., tuple[KVBatchMeta, ...]], layout: MicroBatchLayout
) -> None:
    lengths = (10, 3, 8, 5, 2, 9, 4, 7)
    meta = KVBatchMeta(
        partition="p",
        chunks=(Chunk("1.0", lengths),),
        rows=tuple((0, row) for row in range(8)),
        columns=frozenset(),
        tags={"sample_mask": (1,) * 8, "num_response_tokens": lengths},
    )
    packed = layout is MicroBatchLayout.packed
    strategy = sequence_packing(16, 2) if packed else dynamic_batches(16, 2)
    shards = shard_for(meta, num_shards=2, global_batch_size=8, strategy=strategy)
    first, second = (shard.schedule for shard in shards)
    assert first.layout is second.layout is layout
    assert first.num_microbatches == second.num_microbatches
    for shard in shards:
        (update,) = shard.schedule.global_batches
        assert sorted(row for mb in update.micro_batches for row in mb.rows) == list(range(4))
        for micro_batch in update.micro_batches:
            rounded = [round_up(model_length(shard.lengths[row]), 2) for row in micro_batch.rows]
            assert (sum(rounded) if packed else max(rounded)) <= micro_batch.padded_length <= 16
            if not packed:
                assert len(rounded) * micro_batch.padded_length <= 16


def test_micro_batches_are_cut_in_one_way() -> None:
    meta = KVBatchMeta("p", (Chunk("1.0", (1,)),), ((0, 0),), frozenset())
    with pytest.raises(ValueError, match="either by micro_batch_size or by a strategy"):
        shard_for_training(meta, num_shards=1, global_batch_size=1)
    with pytest.raises(ValueError, match="either by micro_batch_size or by a strategy"):
        shard_for_training(
            meta, num_shards=1, global_batch_size=1, micro_batch_size=1, strategy=dynamic_batches(5)
        )


def test_all_but_a_samples_last_token_enter_the_model() -> None:
    assert [model_length(num_tokens) for num_tokens in (0, 1, 2, 9)] == [0, 1, 1, 8]
