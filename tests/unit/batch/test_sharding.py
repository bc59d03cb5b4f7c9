"""Who trains on what: every sample once, the same updates for any number of ranks, balanced."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.batch.columns import ROLLOUT_COLUMNS
from nemo_like.batch.meta import Chunk, KVBatchMeta
from nemo_like.batch.micro_batches import (
    MicroBatching,
    dynamic_batches,
    fixed_size,
    model_length,
    sequence_packing,
)
from nemo_like.batch.prompt_sharing import PromptSharing
from nemo_like.batch.sharding import (
    add_whole_groups,
    by_generation,
    shard_for_logprobs,
    shard_for_training,
    shard_for_values,
    without_first_update,
)
from nemo_like.batch.tags import GROUP_ID, NUM_PROMPT_TOKENS, SAMPLE_MASK, Tag
from nemo_like.data_plane.in_memory import InMemoryDataPlane

# What these tests know their samples by.
POSITION = Tag("position", int, "test", (), "in the whole batch")
ROW = Tag("row", int, "test", (), "in the whole batch")


def batch(lengths: list[int], group: int, sample_mask: list[int] | None = None) -> KVBatchMeta:
    chunks = tuple(
        Chunk(f"1.{start // group}", tuple(lengths[start : start + group]))
        for start in range(0, len(lengths), group)
    )
    return KVBatchMeta(
        partition="p",
        chunks=chunks,
        rows=tuple((index, row) for index, chunk in enumerate(chunks) for row in range(len(chunk.lengths))),
        columns=frozenset({"input_ids"}),
        tags={
            "sample_mask": tuple(sample_mask or [1] * len(lengths)),
            "num_response_tokens": tuple(length - 1 for length in lengths),
            "position": tuple(range(len(lengths))),
        },
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[KVBatchMeta, int, int, int]:
    num_shards = draw(st.sampled_from([1, 2, 3, 4]))
    group = draw(st.sampled_from([1, 2, 4]))
    batch_size = num_shards * group * draw(st.integers(1, 4))
    count = batch_size * draw(st.integers(1, 3))
    lengths = draw(st.lists(st.integers(1, 50), min_size=count, max_size=count))
    mask = draw(st.lists(st.integers(0, 1), min_size=count, max_size=count))
    return batch(lengths, group, mask), num_shards, batch_size, draw(st.integers(1, 8))


@settings(max_examples=150)
@given(cases())
def test_every_update_is_its_consecutive_samples_each_once(case: tuple[KVBatchMeta, int, int, int]) -> None:
    meta, num_shards, batch_size, micro_batch_size = case
    shards = shard_for_training(
        meta, num_shards=num_shards, global_batch_size=batch_size, micro_batch_size=micro_batch_size
    )
    assert len(shards) == num_shards
    for update in range(len(meta) // batch_size):
        seen = [
            shard.tag(POSITION)[row]
            for shard in shards
            for micro_batch in shard.schedule.global_batches[update].micro_batches
            for row in micro_batch.rows
        ]
        expected = range(update * batch_size, (update + 1) * batch_size)
        assert sorted(seen) == list(expected)
        valid = [position for position in expected if meta.tag(SAMPLE_MASK)[position]]
        for shard in shards:
            counts = shard.schedule.global_batches[update]
            assert counts.num_samples == len(valid)
            assert counts.num_tokens == sum(meta.lengths[position] - 1 for position in valid)


@settings(max_examples=150)
@given(cases())
def test_ranks_run_the_same_number_of_micro_batches_of_the_same_padded_length(
    case: tuple[KVBatchMeta, int, int, int],
) -> None:
    meta, num_shards, batch_size, size = case
    for shard_for in (shard_for_training, shard_for_logprobs):
        shards = shard_for(meta, num_shards=num_shards, global_batch_size=batch_size, micro_batch_size=size)
        schedules = [shard.schedule for shard in shards]
        assert len({schedule.num_microbatches for schedule in schedules}) == 1
        for shard, schedule in zip(shards, schedules, strict=True):
            for mine, firsts in zip(schedule.global_batches, schedules[0].global_batches, strict=True):
                for micro_batch, first in zip(mine.micro_batches, firsts.micro_batches, strict=True):
                    assert 1 <= len(micro_batch.rows) <= size
                    assert micro_batch.padded_length == first.padded_length
                    longest = max(shard.lengths[row] for row in micro_batch.rows)
                    assert model_length(longest) <= micro_batch.padded_length


@settings(max_examples=150)
@given(cases(), st.data())
def test_idle_samples_count_and_are_left_out_alike_on_every_rank(
    case: tuple[KVBatchMeta, int, int, int], data: st.DataObject
) -> None:
    meta, num_shards, batch_size, size = case
    is_idle = data.draw(st.lists(st.booleans(), min_size=len(meta), max_size=len(meta)))
    sizes = {"num_shards": num_shards, "global_batch_size": batch_size, "micro_batch_size": size}
    everything = shard_for_training(meta, **sizes)
    shards = shard_for_training(meta, **sizes, is_idle=is_idle)
    for update in range(len(meta) // batch_size):
        scheduled, num_idle = [], []
        for shard, whole in zip(shards, everything, strict=True):
            assert shard.sample_ids == whole.sample_ids
            mine, all_rows = (
                [
                    shard.tag(POSITION)[row]
                    for micro_batch in of.schedule.global_batches[update].micro_batches
                    for row in micro_batch.rows
                ]
                for of in (shard, whole)
            )
            counts, whole_counts = (of.schedule.global_batches[update] for of in (shard, whole))
            assert (counts.num_samples, counts.num_tokens) == (
                whole_counts.num_samples,
                whole_counts.num_tokens,
            )
            left_out = set(all_rows) - set(mine)
            assert all(is_idle[position] for position in left_out)
            assert len(mine) == len(set(mine)) == len(all_rows) - len(left_out) >= 1
            scheduled.append(len(mine))
            num_idle.append(sum(is_idle[position] for position in all_rows))
        assert len(set(scheduled)) == 1
        rows_per_rank = batch_size // num_shards
        assert scheduled[0] == rows_per_rank - min(*num_idle, rows_per_rank - 1)


def test_the_longest_idle_samples_are_left_out() -> None:
    meta = batch([9, 3, 5, 7], group=4)
    (shard,) = shard_for_training(
        meta, num_shards=1, global_batch_size=4, micro_batch_size=4, is_idle=[True] * 4
    )
    ((rows,),) = shard.schedule.micro_batch_indices
    assert [shard.lengths[row] for row in rows] == [3]


@settings(max_examples=150)
@given(cases())
def test_both_stages_find_a_sample_at_the_same_place(case: tuple[KVBatchMeta, int, int, int]) -> None:
    meta, num_shards, batch_size, size = case
    training = shard_for_training(
        meta, num_shards=num_shards, global_batch_size=batch_size, micro_batch_size=size
    )
    masked = meta.with_tag(SAMPLE_MASK, [0] * len(meta))
    logprobs = shard_for_logprobs(
        masked, num_shards=num_shards, global_batch_size=batch_size, micro_batch_size=3
    )
    assert [shard.sample_ids for shard in training] == [shard.sample_ids for shard in logprobs]
    assert all(len(shard.schedule.global_batches) == 1 for shard in logprobs)


@settings(max_examples=150)
@given(cases(), st.booleans(), st.booleans())
def test_a_critic_values_a_whole_sample_where_it_trains_on_it(
    case: tuple[KVBatchMeta, int, int, int], packs: bool, shares: bool
) -> None:
    """Every rank has the rows of training in their order, each once, and room for all their tokens."""
    meta, num_shards, batch_size, size = case
    meta = meta.with_tags({NUM_PROMPT_TOKENS.name: [1] * len(meta), GROUP_ID.name: [0] * len(meta)})
    train_strategy: MicroBatching = PromptSharing(200) if shares else fixed_size(size)
    sizes = {"num_shards": num_shards, "global_batch_size": batch_size}
    training = shard_for_training(meta, strategy=train_strategy, **sizes)
    strategy = sequence_packing(64, 4) if packs else fixed_size(size, 4)
    valuing = shard_for_values(meta, strategy=strategy, train_strategy=train_strategy, **sizes)
    assert [shard.sample_ids for shard in valuing] == [shard.sample_ids for shard in training]
    (num_micro_batches,) = {shard.schedule.num_microbatches for shard in valuing}
    assert len(num_micro_batches) == 1
    for shard in valuing:
        assert shard.schedule.with_ends
        assert (shard.schedule.layout, shard.schedule.length_multiple) == (
            strategy.layout,
            strategy.length_multiple,
        )
        ((*micro_batches,),) = [update.micro_batches for update in shard.schedule.global_batches]
        assert sorted(row for one in micro_batches for row in one.rows) == list(range(len(shard)))
        for one in micro_batches:
            lengths = [-(-shard.lengths[row] // 4) * 4 for row in one.rows]
            assert (sum if packs else max)(lengths) <= one.padded_length
    assert not any(shard.schedule.with_ends for shard in training)


@settings(max_examples=150)
@given(cases())
def test_ranks_have_equally_many_samples_and_nearly_equally_many_tokens(
    case: tuple[KVBatchMeta, int, int, int],
) -> None:
    """By rows the fullest rank has at most longest - shortest tokens more than the emptiest; whole chunks
    are kept together only when that costs at most 5 % more."""
    meta, num_shards, batch_size, size = case
    shards = shard_for_training(
        meta, num_shards=num_shards, global_batch_size=batch_size, micro_batch_size=size
    )
    for update in range(len(meta) // batch_size):
        rows = [
            [row for mb in shard.schedule.global_batches[update].micro_batches for row in mb.rows]
            for shard in shards
        ]
        assert {len(of_rank) for of_rank in rows} == {batch_size // num_shards}
        loads = [
            sum(shard.lengths[row] for row in of_rank) for shard, of_rank in zip(shards, rows, strict=True)
        ]
        window = meta.lengths[update * batch_size : (update + 1) * batch_size]
        spread = max(window) - min(window)
        assert max(loads) <= 1.05 * (sum(window) / num_shards + spread)


def test_whole_chunks_stay_on_one_rank_where_they_balance() -> None:
    meta = batch([10, 12, 11, 11, 11, 11, 12, 10], group=2)
    shards = shard_for_training(meta, num_shards=2, global_batch_size=8, micro_batch_size=4)
    assert [shard.tag(POSITION) for shard in shards] == [(0, 1, 4, 5), (2, 3, 6, 7)]


def test_chunks_are_split_where_they_do_not_balance() -> None:
    """Chunks of 200 and 4 tokens can't be balanced over two ranks; rows can."""
    meta = batch([100, 100, 2, 2], group=2)
    shards = shard_for_training(meta, num_shards=2, global_batch_size=4, micro_batch_size=2)
    assert [sum(shard.lengths) for shard in shards] == [102, 102]


def test_micro_batches_go_from_long_to_short_so_that_little_is_padded() -> None:
    meta = batch([2, 9, 3, 8, 4, 7], group=2)
    (shard,) = shard_for_training(meta, num_shards=1, global_batch_size=6, micro_batch_size=2)
    micro_batches = shard.schedule.global_batches[0].micro_batches
    assert [micro_batch.rows for micro_batch in micro_batches] == [(1, 3), (5, 4), (2, 0)]
    assert [micro_batch.padded_length for micro_batch in micro_batches] == [8, 6, 2]


def test_padded_lengths_are_multiples_where_a_layout_needs_it() -> None:
    meta = batch([1, 9, 2, 8], group=2)
    (shard,) = shard_for_training(
        meta, num_shards=1, global_batch_size=4, micro_batch_size=2, length_multiple=4
    )
    assert [mb.padded_length for mb in shard.schedule.global_batches[0].micro_batches] == [8, 4]


@pytest.mark.parametrize("shard_for", [shard_for_training, shard_for_logprobs])
@pytest.mark.parametrize(
    ("num_shards", "batch_size", "micro_batch_size", "message"),
    [
        (3, 4, 1, "train_global_batch_size=4 must be a multiple of data_parallel_size=3; try 6"),
        (2, 6, 1, "8 samples do not divide into updates of train_global_batch_size=6"),
        (2, 4, 0, "micro_batch_size=0 must be at least 1"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(
    shard_for: Callable[..., object], num_shards: int, batch_size: int, micro_batch_size: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        shard_for(
            batch([1] * 8, group=2),
            num_shards=num_shards,
            global_batch_size=batch_size,
            micro_batch_size=micro_batch_size,
        )


@pytest.mark.parametrize("num_readers", [1, 2, 4])
def test_what_a_rank_will_read_is_stored_together(num_readers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    plane, lengths = InMemoryDataPlane(), [1 + (7 * row) % 13 for row in range(64)]
    plane.open_partition("p", ROLLOUT_COLUMNS, num_readers)
    # A token's id says to which sample it belongs.
    ids = np.repeat(np.arange(64, dtype=np.int32), lengths)
    columns = {"input_ids": ids, "response_mask": np.ones(len(ids), np.uint8)}
    tags = {"sample_mask": [1] * 64, "num_response_tokens": lengths, "row": list(range(64))}
    meta = plane.put("p", columns, lengths=lengths, chunk_sizes=[4] * 16, tags=tags)
    reader = InMemoryDataPlane(plane.host)
    loaded: list[int] = []
    load = reader._store.load

    def spy(segments: Any, timeout_s: float) -> Any:
        loaded.append(len(segments))
        return load(segments, timeout_s)

    monkeypatch.setattr(reader._store, "load", spy)
    for shard in shard_for_training(meta, num_shards=num_readers, global_batch_size=64, micro_batch_size=4):
        got = reader.fetch(shard, ["input_ids", "response_mask"])
        assert got["input_ids"].tolist() == [row for row in shard.tag(ROW) for _ in range(lengths[row])]
    assert loaded == [1] * num_readers


@pytest.mark.parametrize(
    ("strategy", "num_shards", "expected"),
    [
        (fixed_size(8), 1, [0, 1, 2]),
        # Of the other groups, those with the fewest tokens: the fourth has 3, the second 6, the third 9.
        (fixed_size(8), 2, [0, 1, 2, 9, 10, 11]),
        (fixed_size(8), 9, [0, 1, 2, 3, 4, 5, 9, 10, 11]),
        # Three samples divide by 3, but their group cannot be on three ranks.
        (fixed_size(8), 3, [0, 1, 2]),
        (PromptSharing(64), 3, [0, 1, 2, 3, 4, 5, 9, 10, 11]),
        (PromptSharing(64), 8, [*range(12)]),
    ],
)
def test_a_subset_is_filled_up_with_the_shortest_whole_groups_of_others(
    strategy: MicroBatching, num_shards: int, expected: list[int]
) -> None:
    whole = batch([5, 5, 5, 2, 2, 2, 3, 3, 3, 1, 1, 1], group=3)
    part = add_whole_groups(whole, [True] * 3 + [False] * 9, num_shards=num_shards, strategy=strategy)
    assert [*part.tag(POSITION)] == expected


@given(st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([1, 2, 3, 4]), st.data())
def test_every_part_of_a_step_can_be_sharded(group: int, num_shards: int, data: st.DataObject) -> None:
    num_groups = num_shards * data.draw(st.integers(1, 3))
    whole = batch([2] * group * num_groups, group)
    owned = data.draw(st.lists(st.booleans(), min_size=num_groups, max_size=num_groups).filter(any))
    is_own = [one for one in owned for _ in range(group)]
    part = add_whole_groups(whole, is_own, num_shards=num_shards, strategy=fixed_size(4))
    shards = shard_for_logprobs(
        part, num_shards=num_shards, global_batch_size=len(part), strategy=fixed_size(4)
    )
    seen = sorted(position for shard in shards for position in shard.tag(POSITION))
    assert seen == [*part.tag(POSITION)]
    assert {position for position, one in enumerate(is_own) if one} <= set(seen)
    assert len(part) - sum(is_own) < num_shards * group


@pytest.mark.parametrize(
    "strategy", [fixed_size(2), dynamic_batches(40), sequence_packing(40), PromptSharing(40)]
)
@given(num_shards=st.sampled_from([1, 2, 4]), data=st.data())
def test_any_parts_that_divide_over_the_ranks_are_computed_once_and_scored_where_they_train(
    strategy: MicroBatching, num_shards: int, data: st.DataObject
) -> None:
    count = num_shards * 4 * data.draw(st.integers(1, 3))
    lengths = data.draw(st.lists(st.integers(2, 30), min_size=count, max_size=count))
    whole = batch(lengths, group=4).with_tag(GROUP_ID, [row // 4 for row in range(count)])
    whole = whole.with_tag(NUM_PROMPT_TOKENS, [1] * count)
    order = data.draw(st.permutations(range(count)))
    ends = data.draw(st.sets(st.integers(1, count // num_shards).map(lambda number: number * num_shards)))
    sizes: dict[str, Any] = {"num_shards": num_shards, "strategy": strategy}
    computed: list[int] = []
    for start, end in pairwise(sorted({0, count, *ends})):
        part = whole.subset(order[start:end])
        training = shard_for_training(part, global_batch_size=end - start, **sizes)
        scoring = shard_for_logprobs(part, global_batch_size=end - start, **sizes)
        assert [shard.sample_ids for shard in training] == [shard.sample_ids for shard in scoring]
        assert len({shard.schedule.num_microbatches for shard in training}) == 1
        for shard in training:
            (of_update,) = positions_of(shard)
            computed += [position for one in of_update for position in one]
    assert sorted(computed) == list(range(count))


@given(cases(), st.integers(1, 2))
def test_what_was_accumulated_is_counted_and_not_computed(
    case: tuple[KVBatchMeta, int, int, int], num_epochs: int
) -> None:
    whole, num_shards, batch_size, size = case
    for once in shard_for_training(
        whole, num_shards=num_shards, global_batch_size=batch_size, micro_batch_size=size
    ):
        shard = once.with_schedule(once.schedule.repeated(num_epochs))
        left = without_first_update(shard)
        before, after = shard.schedule.global_batches, left.schedule.global_batches
        assert [(one.num_samples, one.num_tokens) for one in after] == [
            (one.num_samples, one.num_tokens) for one in before
        ]
        assert positions_of(left) == [[], *positions_of(shard)[1:]]
        needed = {position for update in positions_of(left) for one in update for position in one}
        assert set(left.tag(POSITION)) == needed


def positions_of(shard: KVBatchMeta) -> list[list[list[int]]]:
    """The samples of each micro-batch of each update, as positions in the whole batch."""
    positions = shard.tag(POSITION)
    return [
        [[positions[row] for row in one.rows] for one in update.micro_batches]
        for update in shard.schedule.global_batches
    ]


def test_all_first_generations_come_first() -> None:
    assert by_generation(num_prompts=3, num_generations=2) == [0, 2, 4, 1, 3, 5]


def test_neighbours_of_a_prompt_stay_together() -> None:
    assert by_generation(num_prompts=2, num_generations=5, kept_together=2) == [0, 1, 5, 6, 2, 3, 7, 8, 4, 9]


@given(st.integers(1, 20), st.integers(1, 20), st.integers(1, 25))
def test_every_sample_comes_exactly_once(num_prompts: int, num_generations: int, kept_together: int) -> None:
    order = by_generation(num_prompts, num_generations, kept_together)
    assert sorted(order) == list(range(num_prompts * num_generations))
