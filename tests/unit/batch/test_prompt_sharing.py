"""Groups in micro-batches that hold each prompt once: nothing lost, budgets kept, groups whole."""

from __future__ import annotations

import itertools
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.batch.meta import Chunk, KVBatchMeta, MicroBatch, MicroBatchLayout
from nemo_like.batch.micro_batches import Prompt, round_up
from nemo_like.batch.prompt_sharing import PromptSharing
from nemo_like.batch.sharding import shard_for_logprobs, shard_for_training
from nemo_like.batch.tags import GROUP_ID

BUDGET = 60
Ranks = tuple[list[list[int]], list[list[Prompt]]]


@st.composite
def ranks(draw: st.DrawFn) -> Ranks:
    """Lengths and prompts of equally many samples on every rank, each prompt with its response or without."""
    num_ranks, num_samples = draw(st.integers(1, 3)), draw(st.integers(1, 16))
    prompt_lengths = draw(st.lists(st.integers(1, 20), min_size=4, max_size=4))
    lengths, prompts = [], []
    for _ in range(num_ranks):
        groups = draw(st.lists(st.integers(0, 3), min_size=num_samples, max_size=num_samples))
        after = draw(st.lists(st.integers(-1, 25), min_size=num_samples, max_size=num_samples))
        prompts.append([Prompt(group, prompt_lengths[group]) for group in groups])
        lengths.append([max(1, p.num_tokens + n) for p, n in zip(prompts[-1], after, strict=True)])
    return lengths, prompts


def tokens(micro_batch: MicroBatch, lengths: list[int], prompts: list[Prompt]) -> int:
    """Counted sample by sample: all of it, less what is there already."""
    return sum(lengths[row] for row in micro_batch.rows) - sum(micro_batch.shared)


@settings(max_examples=300)
@given(ranks(), st.sampled_from([1, 4, 8]))
def test_every_sample_is_in_one_micro_batch_within_the_budget(of_ranks: Ranks, multiple: int) -> None:
    lengths, prompts = of_ranks
    planned = PromptSharing(BUDGET, multiple).micro_batches(lengths, prompts)
    assert len({len(of_rank) for of_rank in planned}) == 1
    for of_rank, mine, starts in zip(planned, lengths, prompts, strict=True):
        assert sorted(itertools.chain(*(one.rows for one in of_rank))) == list(range(len(mine)))
        for micro_batch in of_rank:
            assert micro_batch.padded_length % multiple == 0
            assert tokens(micro_batch, mine, starts) <= micro_batch.padded_length <= BUDGET
    for of_number in zip(*planned, strict=True):
        assert len({one.padded_length for one in of_number}) == 1
        longest = max(
            tokens(one, *own) for one, own in zip(of_number, zip(lengths, prompts, strict=True), strict=True)
        )
        assert of_number[0].padded_length == round_up(longest, multiple)


@settings(max_examples=300)
@given(ranks())
def test_neighbours_of_one_prompt_share_what_they_have_of_it(of_ranks: Ranks) -> None:
    lengths, prompts = of_ranks
    planned = PromptSharing(BUDGET).micro_batches(lengths, prompts)
    for of_rank, mine, starts in zip(planned, lengths, prompts, strict=True):
        for rows, _, shared in of_rank:
            assert shared[0] == 0
            for before, row, count in zip(rows, rows[1:], shared[1:], strict=False):
                common = min(starts[row].num_tokens, mine[row], mine[before])
                # Parts of a group that is over the budget may be neighbours too, each with its prompt.
                assert count in ((common, 0) if starts[row] == starts[before] else (0,))


@settings(max_examples=100)
@given(ranks())
def test_one_rank_divides_only_groups_that_are_over_the_budget(of_ranks: Ranks) -> None:
    lengths, prompts = of_ranks[0][:1], of_ranks[1][:1]
    (planned,) = PromptSharing(BUDGET).micro_batches(lengths, prompts)
    for prompt in set(prompts[0]):
        rows = {row for row, other in enumerate(prompts[0]) if other == prompt}
        in_turn = [lengths[0][row] for row in sorted(rows)]
        shared = sum(min(prompt.num_tokens, *both) for both in itertools.pairwise(in_turn))
        size = sum(in_turn) - shared
        holding = [one for one in planned if rows & set(one.rows)]
        assert (len(holding) == 1) == (size <= BUDGET)


def test_groups_by_hand() -> None:
    """Prompts of 4 and 2 tokens; 4 + 3 + 1 and 2 + 2 + 2 fit into 14 together. The last token of a sample
    is not among its ``lengths``."""
    lengths = [[7, 4, 5, 4]]
    prompts = [[Prompt("a", 4), Prompt("b", 2), Prompt("a", 4), Prompt("b", 2)]]
    assert PromptSharing(14).micro_batches(lengths, prompts) == [[MicroBatch((0, 2, 1, 3), 14, (0, 4, 0, 2))]]
    assert PromptSharing(13).micro_batches(lengths, prompts) == [
        [MicroBatch((0, 2), 8, (0, 4)), MicroBatch((1, 3), 6, (0, 2))]
    ]


def test_a_rank_with_too_few_micro_batches_divides_its_fullest() -> None:
    lengths = [[9, 9], [3, 4]]
    prompts = [[Prompt(0, 1), Prompt(1, 1)], [Prompt(2, 2), Prompt(2, 2)]]
    first, second = PromptSharing(10).micro_batches(lengths, prompts)
    assert [one.rows for one in first] == [(0,), (1,)]
    assert [(one.rows, one.shared) for one in second] == [((1,), (0,)), ((0,), (0,))]


def test_what_cannot_be_placed_is_refused() -> None:
    with pytest.raises(
        ValueError, match="a sample of 12 tokens is over the micro-batch's budget of 10 tokens"
    ):
        PromptSharing(10).micro_batches([[3, 12]], [[Prompt(0, 2), Prompt(0, 2)]])
    with pytest.raises(ValueError, match="1 samples can't fill 2 micro-batches"):
        PromptSharing(10).micro_batches([[9, 9], [3]], [[Prompt(0, 1), Prompt(1, 1)], [Prompt(0, 1)]])


GROUPS, GROUP_SIZE = 8, 4


def grouped_batch() -> KVBatchMeta:
    """Eight groups of four as a rollout stores them: long and short ones, so that whole groups differ."""
    lengths = [[10 + 30 * (group % 4 == 0) + row for row in range(GROUP_SIZE)] for group in range(GROUPS)]
    count = GROUPS * GROUP_SIZE
    return KVBatchMeta(
        partition="step",
        chunks=tuple(Chunk(f"group-{group}", tuple(of_group)) for group, of_group in enumerate(lengths)),
        rows=tuple((group, row) for group in range(GROUPS) for row in range(GROUP_SIZE)),
        columns=frozenset({"input_ids"}),
        tags={
            "sample_mask": (1.0,) * count,
            "num_response_tokens": (5,) * count,
            "num_prompt_tokens": (5,) * count,
            "group_id": tuple(group for group in range(GROUPS) for _ in range(GROUP_SIZE)),
        },
    )


@pytest.mark.parametrize("shard", [shard_for_training, shard_for_logprobs])
def test_whole_groups_stay_on_one_rank_though_others_then_have_less(shard: object) -> None:
    shards = shard(grouped_batch(), num_shards=2, global_batch_size=16, strategy=PromptSharing(200))
    for mine in shards:
        groups = [mine.tag(GROUP_ID).count(group) for group in set(mine.tag(GROUP_ID))]
        assert groups == [GROUP_SIZE] * (GROUPS // 2)
        assert mine.schedule.layout is MicroBatchLayout.packed
        for update in mine.schedule.global_batches:
            for micro_batch in update.micro_batches:
                assert micro_batch.shared == (0, *[5] * (GROUP_SIZE - 1)) * (
                    len(micro_batch.rows) // GROUP_SIZE
                )


def test_idle_groups_leave_whole() -> None:
    batch = grouped_batch()
    is_idle = [group in (0, 1, 2, 5) for group in batch.tag(GROUP_ID)]
    shards = shard_for_training(
        batch, num_shards=1, global_batch_size=32, strategy=PromptSharing(400), is_idle=is_idle
    )
    (update,) = shards[0].schedule.global_batches
    shared = [count for one in update.micro_batches for count in one.shared]
    assert shared == [0, *[5] * (GROUP_SIZE - 1)] * 4


def test_a_schedule_with_shared_prompts_travels_whole() -> None:
    (shard,) = shard_for_training(
        grouped_batch(), num_shards=1, global_batch_size=16, strategy=PromptSharing(100)
    )
    assert pickle.loads(pickle.dumps(shard.schedule)) == shard.schedule
    micro_batches = [one for batch in shard.schedule.global_batches for one in batch.micro_batches]
    assert sum(one.shared.count(0) for one in micro_batches) >= GROUPS
