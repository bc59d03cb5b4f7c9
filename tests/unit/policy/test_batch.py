from __future__ import annotations

import math
from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nemo_like.algorithms.logprobs import LogprobSettings
from nemo_like.batch.columns import Column, Layout
from nemo_like.batch.forest import TokenRun
from nemo_like.batch.meta import MicroBatch, MicroBatchLayout, Schedule
from nemo_like.policy.batch.context_parts import ContextRank, context_positions
from nemo_like.policy.batch.policy_batch import PolicyBatch, empty_outputs, keep_outputs

CPU = torch.device("cpu")
PADDED = Schedule(())
PACKED = Schedule((), MicroBatchLayout.packed)


def two_samples() -> PolicyBatch:
    """Sample 0: prompt 10 11, response 12 13. Sample 1: prompt 20, response 21, tool 22, response 23."""
    columns = {
        "input_ids": np.array([10, 11, 12, 13, 20, 21, 22, 23], np.int32),
        "response_mask": np.array([0, 0, 1, 1, 0, 1, 0, 1], np.uint8),
        "prev_logprobs": np.arange(8, dtype=np.float32),
    }
    return PolicyBatch(columns, [4, 4], {"advantage": [1.5, -1.0]}, CPU)


def test_a_micro_batch_has_its_part_of_columns_of_every_layout() -> None:
    columns = {
        Column("credit", "float32", Layout.per_token, inner_shape=(2,)): np.arange(16).reshape(8, 2),
        Column("score", "float32", Layout.per_sample): np.array([1.0, 2.0, 3.0][:2]),
        Column("level", "float32", Layout.per_sample, per_prompt=True): np.array([7.0]),
        Column("images", "", Layout.ragged): [["a"], ["b"]],
        Column("notes", "", Layout.objects, per_prompt=True): ["of both"],
    }
    names = {
        "input_ids": np.arange(8, dtype=np.int32),
        "response_mask": two_samples().columns["response_mask"],
    }
    batch = PolicyBatch(names, [4, 4], {}, CPU, prompt_index=[0, 0])
    batch.add(columns)
    inputs = batch.micro_batch(MicroBatch(rows=(1, 0), padded_length=6), PADDED)
    credit, score, level, images, notes = (batch.values_of(column, inputs) for column in columns)
    assert credit.tolist() == [[10, 11], [14, 15], [4, 5], [6, 7]]
    assert score.tolist() == [2.0, 1.0]
    assert level.tolist() == [7.0, 7.0]
    assert images == [["b"], ["a"]]
    assert notes == ["of both", "of both"]
    assert all(column in batch for column in columns)
    assert Column("other", "", Layout.objects) not in batch


def test_a_micro_batch_is_padded_on_the_right_and_names_the_tokens_to_score() -> None:
    micro_batch = two_samples().micro_batch(MicroBatch(rows=(1, 0), padded_length=6), PADDED)
    assert micro_batch.input_ids.tolist() == [[20, 21, 22, 0, 0, 0], [10, 11, 12, 0, 0, 0]]
    assert micro_batch.position_ids.tolist() == [[0, 1, 2, 3, 4, 5]] * 2
    assert micro_batch.token_ids.tolist() == [21, 23, 12, 13]
    assert micro_batch.sample_index.tolist() == [0, 0, 1, 1]
    assert micro_batch.packed_index.tolist() == [5, 7, 2, 3]
    assert micro_batch.rows.tolist() == [1, 0]


def test_a_token_is_scored_by_the_output_at_the_position_before_it() -> None:
    micro_batch = two_samples().micro_batch(MicroBatch(rows=(1, 0), padded_length=6), PADDED)
    # Outputs are [positions, samples]: token 21 at position 1 of sample 0 comes from output (0, 0),
    # 23 at 3 from (2, 0), 12 at 2 of sample 1 from (1, 1), 13 at 3 from (2, 1).
    positions = torch.arange(12).view(6, 2)
    expected = [positions[0, 0], positions[2, 0], positions[1, 1], positions[2, 1]]
    assert micro_batch.output_index.tolist() == [int(index) for index in expected]


def test_samples_of_different_lengths_do_not_run_into_each_other() -> None:
    columns = {
        "input_ids": np.array([1, 2, 3, 4, 5, 6], np.int32),
        "response_mask": np.array([0, 1, 0, 1, 1, 1], np.uint8),
    }
    micro_batch = PolicyBatch(columns, [2, 4], {}, CPU).micro_batch(MicroBatch((0, 1), 3), PADDED)
    assert micro_batch.input_ids.tolist() == [[1, 0, 0], [3, 4, 5]]
    assert micro_batch.token_ids.tolist() == [2, 4, 5, 6]


def test_response_lengths_count_the_scored_tokens_of_each_sample() -> None:
    assert two_samples().response_lengths.tolist() == [2, 2]


def test_sums_per_sample_include_samples_without_tokens() -> None:
    columns = {"input_ids": np.zeros(3, np.int32), "response_mask": np.array([0, 0, 1], np.uint8)}
    batch = PolicyBatch(columns, [1, 0, 2], {}, CPU)
    assert batch.sum_per_sample(torch.tensor([1.0, 2.0, 3.0])).tolist() == [1, 0, 5]


def test_a_micro_batch_without_response_tokens_scores_nothing() -> None:
    columns = {"input_ids": np.array([1, 2], np.int32), "response_mask": np.zeros(2, np.uint8)}
    micro_batch = PolicyBatch(columns, [2], {}, CPU).micro_batch(MicroBatch((0,), 2), PADDED)
    assert len(micro_batch.token_ids) == len(micro_batch.output_index) == 0


def test_a_column_that_does_not_fit_the_lengths_is_refused_by_name() -> None:
    columns = {"input_ids": np.zeros(3, np.int32), "response_mask": np.zeros(4, np.uint8)}
    with pytest.raises(ValueError, match="'response_mask' has 4 tokens for lengths that sum to 3"):
        PolicyBatch(columns, [3], {}, CPU)


def test_a_generated_first_token_is_refused_because_nothing_predicts_it() -> None:
    columns = {"input_ids": np.zeros(3, np.int32), "response_mask": np.array([1, 1, 1], np.uint8)}
    with pytest.raises(ValueError, match="first token"):
        PolicyBatch(columns, [3], {}, CPU)


def test_a_packed_micro_batch_is_one_row_of_samples_end_to_end() -> None:
    inputs = two_samples().micro_batch(MicroBatch(rows=(1, 0), padded_length=6), PACKED)
    assert inputs.input_ids.tolist() == [[20, 21, 22, 10, 11, 12]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 0, 1, 2]]
    assert inputs.token_ids.tolist() == [21, 23, 12, 13]
    assert inputs.output_index.tolist() == [0, 2, 4, 5]
    assert inputs.sample_index.tolist() == [0, 0, 1, 1]
    assert inputs.packed_index.tolist() == [5, 7, 2, 3]
    assert inputs.packing is not None
    assert inputs.packing.cu_seqlens.tolist() == [0, 3, 6]
    assert inputs.packing.lengths == (3, 3)


def test_packed_samples_start_at_multiples_and_what_is_left_of_the_row_is_a_sample_of_padding() -> None:
    columns = {
        "input_ids": np.array([1, 2, 3, 4, 5], np.int32),
        "response_mask": np.array([0, 1, 0, 1, 1], np.uint8),
    }
    schedule = Schedule((), MicroBatchLayout.packed, length_multiple=4)
    inputs = PolicyBatch(columns, [2, 3], {}, CPU).micro_batch(MicroBatch((0, 1), 12), schedule)
    assert inputs.input_ids.tolist() == [[1, 0, 0, 0, 3, 4, 0, 0, 0, 0, 0, 0]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3] * 3]
    assert inputs.output_index.tolist() == [0, 4, 5]
    assert inputs.packing is not None
    assert (inputs.packing.lengths, inputs.packing.max_length) == ((4, 4, 4), 4)


@pytest.mark.parametrize("schedule", [PADDED, PACKED])
def test_the_last_token_of_a_sample_is_scored_and_does_not_enter_the_model(schedule: Schedule) -> None:
    inputs = two_samples().micro_batch(MicroBatch(rows=(0,), padded_length=3), schedule)
    assert inputs.input_ids.tolist() == [[10, 11, 12]]
    assert inputs.token_ids.tolist() == [12, 13]


@pytest.mark.parametrize("schedule", [PADDED, PACKED])
def test_a_sample_of_one_token_scores_nothing_of_the_sample_after_it(schedule: Schedule) -> None:
    columns = {
        "input_ids": np.array([1, 2, 3, 4], np.int32),
        "response_mask": np.array([0, 0, 1, 0], np.uint8),
    }
    batch = PolicyBatch(columns, [1, 2, 1], {}, CPU)
    inputs = batch.micro_batch(MicroBatch(rows=(0, 1, 2), padded_length=3), schedule)
    assert (inputs.token_ids.tolist(), inputs.sample_index.tolist()) == ([3], [1])
    assert inputs.packed_index.tolist() == [2]


@pytest.mark.parametrize("schedule", [PADDED, PACKED])
def test_samples_that_do_not_fit_their_row_are_refused(schedule: Schedule) -> None:
    with pytest.raises(ValueError, match="tokens"):
        two_samples().micro_batch(MicroBatch(rows=(0, 1), padded_length=2), schedule)


def test_a_context_rank_has_one_piece_from_the_front_and_one_from_the_back() -> None:
    assert context_positions(8, 0, 2).tolist() == [0, 1, 6, 7]
    assert context_positions(8, 1, 2).tolist() == [2, 3, 4, 5]
    assert context_positions(5, 0, 1).tolist() == [0, 1, 2, 3, 4]


def test_context_ranks_score_the_tokens_whose_prediction_they_hold() -> None:
    spec = MicroBatch(rows=(1, 0), padded_length=4)
    # Scored are positions 1 and 3 of row 0, 2 and 3 of row 1, from the outputs at 0, 2 and 1, 2.
    first = two_samples().micro_batch(spec, PADDED, ContextRank(0, 2))
    assert first.input_ids.tolist() == [[20, 0], [10, 0]]
    assert first.position_ids.tolist() == [[0, 3], [0, 3]]
    assert first.context_index is not None
    assert (first.token_ids.tolist(), first.context_index.tolist()) == ([21], [0])
    assert first.output_index.tolist() == [0]
    second = two_samples().micro_batch(spec, PADDED, ContextRank(1, 2))
    assert second.input_ids.tolist() == [[21, 22], [11, 12]]
    assert second.context_index is not None
    assert (second.token_ids.tolist(), second.context_index.tolist()) == ([23, 12, 13], [1, 2, 3])
    # [T, B]: position 2 is this rank's second, so 1 * 2 + 0; then positions 1 and 2 of row 1
    assert second.output_index.tolist() == [2, 1, 3]
    assert first.packed_index.tolist() == second.packed_index.tolist() == [5, 7, 2, 3]


def test_packed_samples_are_cut_over_context_ranks_one_by_one() -> None:
    schedule = Schedule((), MicroBatchLayout.packed, length_multiple=4)
    spec = MicroBatch(rows=(1, 0), padded_length=8)
    first = two_samples().micro_batch(spec, schedule, ContextRank(0, 2))
    assert first.input_ids.tolist() == [[20, 0, 10, 0]]
    assert first.position_ids.tolist() == [[0, 3, 0, 3]]
    assert first.packing is not None
    assert first.packing.cu_seqlens.tolist() == [0, 4, 8]  # of whole samples
    assert (first.token_ids.tolist(), first.output_index.tolist()) == ([21], [0])
    second = two_samples().micro_batch(spec, schedule, ContextRank(1, 2))
    assert second.input_ids.tolist() == [[21, 22, 11, 12]]
    assert (second.token_ids.tolist(), second.output_index.tolist()) == ([23, 12, 13], [1, 2, 3])


def three_samples() -> PolicyBatch:
    """Samples 0 and 2: prompt 10 11, responses 12 13 and 14. Sample 1: prompt 20, response 21, tool 22,
    response 23."""
    columns = {
        "input_ids": np.array([10, 11, 12, 13, 20, 21, 22, 23, 10, 11, 14], np.int32),
        "response_mask": np.array([0, 0, 1, 1, 0, 1, 0, 1, 0, 0, 1], np.uint8),
    }
    return PolicyBatch(columns, [4, 4, 3], {}, CPU)


def test_a_shared_prompt_enters_the_model_once_and_predicts_every_first_response_token() -> None:
    spec = MicroBatch((1, 0, 2), 8, (0, 0, 2))
    inputs = three_samples().micro_batch(spec, PACKED)
    # 20 21 22, then 10 11 and 12 after it; 14 only comes out.
    assert inputs.input_ids.tolist() == [[20, 21, 22, 10, 11, 12, 0, 0]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 0, 1, 2, 0, 0]]
    assert inputs.token_ids.tolist() == [21, 23, 12, 13, 14]
    assert inputs.output_index.tolist() == [0, 2, 4, 5, 4]
    assert inputs.sample_index.tolist() == [0, 0, 1, 1, 2]
    assert inputs.packed_index.tolist() == [5, 7, 2, 3, 10]
    assert inputs.rows.tolist() == [1, 0, 2]
    assert inputs.packing is None
    assert inputs.forest is not None
    assert inputs.forest.runs == (TokenRun(3), TokenRun(3))


def session() -> PolicyBatch:
    """A prompt 10 11 with the response 12 13; after 11 also the response 14, which is read, and 15; a second
    tree 16, and 17."""
    columns = {
        "input_ids": np.array([10, 11, 12, 13, 14, 15, 16, 17], np.int32),
        "response_mask": np.array([0, 0, 1, 1, 0, 1, 0, 1], np.uint8),
        "parent_gaps": np.array([0, 0, 0, 0, 2, 0, 6, 0], np.int32),
    }
    return PolicyBatch(columns, [8], {}, CPU)


def test_a_session_enters_the_model_with_each_token_once() -> None:
    inputs = session().micro_batch(MicroBatch((0,), 8), PACKED)
    assert inputs.input_ids.tolist() == [[10, 11, 12, 13, 14, 15, 16, 0]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3, 2, 3, 0, 0]]
    assert inputs.forest is not None
    assert inputs.forest.runs == (TokenRun(4), TokenRun(2, 1), TokenRun(1))
    assert inputs.token_ids.tolist() == [12, 13, 15, 17]
    assert inputs.output_index.tolist() == [1, 2, 4, 6]


def test_with_ends_each_run_of_a_session_has_one() -> None:
    batch, schedule = session(), replace(PACKED, with_ends=True)
    inputs = batch.micro_batch(MicroBatch((0,), 8), schedule)
    assert inputs.packed_index.tolist() == [2, 3, 5, 7, 8, 9, 10]
    assert inputs.output_index.tolist() == [1, 2, 4, 6, 3, 5, 7]
    assert inputs.sample_index.tolist() == [0] * 7
    assert batch.num_outputs(schedule) == 11
    assert batch.num_outputs(PACKED) == 8


def test_a_forest_is_cut_over_context_ranks_as_one_sample() -> None:
    spec = MicroBatch((0,), 8)
    first, second = (session().micro_batch(spec, PACKED, ContextRank(rank, 2)) for rank in (0, 1))
    assert first.input_ids.tolist() == [[10, 11, 16, 0]]
    assert first.position_ids.tolist() == [[0, 1, 0, 0]]
    assert (first.token_ids.tolist(), first.output_index.tolist()) == ([12, 17], [1, 2])
    assert second.input_ids.tolist() == [[12, 13, 14, 15]]
    assert (second.token_ids.tolist(), second.output_index.tolist()) == ([13, 15], [0, 2])


def test_samples_without_a_response_share_a_prompt_that_nothing_reads() -> None:
    columns = {"input_ids": np.array([1, 2, 1, 2], np.int32), "response_mask": np.zeros(4, np.uint8)}
    batch = PolicyBatch(columns, [2, 2], {}, CPU)
    inputs = batch.micro_batch(MicroBatch((0, 1), 1, (0, 1)), PACKED)
    assert inputs.input_ids.tolist() == [[1]]
    assert len(inputs.token_ids) == len(inputs.output_index) == 0


@pytest.mark.parametrize(
    ("rows", "shared", "why"),
    [
        ((1, 0), 2, "begin with different tokens, so cannot share them"),
        ((0, 2), 3, "3 tokens are shared with the sample before, of which 3 tokens"),
        ((2, 0), 3, "begin with different tokens"),
    ],
)
def test_samples_that_do_not_begin_alike_are_not_made_to(
    rows: tuple[int, int], shared: int, why: str
) -> None:
    batch = three_samples()
    batch.columns["response_mask"][:] = 0
    batch.columns["input_ids"][2] = 12 if rows[0] == 2 else 14
    with pytest.raises(ValueError, match=why):
        batch.micro_batch(MicroBatch(rows, 12, (0, shared)), PACKED)


def test_generated_tokens_are_not_shared() -> None:
    batch = three_samples()
    batch.columns["input_ids"][2] = 14
    with pytest.raises(ValueError, match="response_mask marks a token that samples share"):
        batch.micro_batch(MicroBatch((0, 2), 8, (0, 3)), PACKED)


def routed_samples() -> PolicyBatch:
    """Those of ``two_samples``; a token's route in layer 0 is its id less 9, in layer 1 ten more."""
    batch = two_samples()
    routes = np.stack([batch.columns["input_ids"] - 9, batch.columns["input_ids"] + 1], axis=1)
    routes[[3, 7]] = 0  # the last token of each sample is not read
    batch.add({Column("routed_experts", "uint8", Layout.per_token, inner_shape=(2, 1)): routes[..., None]})
    return batch


def test_padded_inputs_have_the_routes_of_their_tokens_and_none_in_padding() -> None:
    inputs = routed_samples().micro_batch(MicroBatch(rows=(1, 0), padded_length=5), PADDED)
    assert inputs.routes is not None
    assert inputs.routes.shape == (2, 5, 2, 1)
    assert inputs.routes[..., 0, 0].tolist() == [[11, 12, 13, 0, 0], [1, 2, 3, 0, 0]]
    assert inputs.routes[..., 1, 0].tolist() == [[21, 22, 23, 0, 0], [11, 12, 13, 0, 0]]
    assert two_samples().micro_batch(MicroBatch((0,), 4), PADDED).routes is None


def test_packed_inputs_have_the_routes_where_the_tokens_are() -> None:
    packed = Schedule((), MicroBatchLayout.packed, length_multiple=4)
    inputs = routed_samples().micro_batch(MicroBatch(rows=(1, 0), padded_length=12), packed)
    assert inputs.routes is not None
    assert inputs.routes[0, :, 0, 0].tolist() == [11, 12, 13, 0, 1, 2, 3, 0, 0, 0, 0, 0]


def test_context_parallel_ranks_have_the_routes_of_their_own_tokens() -> None:
    packed = Schedule((), MicroBatchLayout.packed, length_multiple=4)
    parts = [
        routed_samples().micro_batch(MicroBatch((1, 0), 8), packed, ContextRank(rank, 2)) for rank in range(2)
    ]
    # Rank 0 has the first and the last quarter of each sample of four places.
    assert [part.routes[0, :, 0, 0].tolist() for part in parts] == [[11, 0, 1, 0], [12, 13, 2, 3]]


PADDED_WITH_ENDS, PACKED_WITH_ENDS = (replace(schedule, with_ends=True) for schedule in (PADDED, PACKED))


def test_with_ends_padded_samples_enter_whole_and_their_last_outputs_are_for_their_ends() -> None:
    inputs = two_samples().micro_batch(MicroBatch(rows=(1, 0), padded_length=6), PADDED_WITH_ENDS)
    assert inputs.input_ids.tolist() == [[20, 21, 22, 23, 0, 0], [10, 11, 12, 13, 0, 0]]
    assert inputs.packed_index.tolist() == [5, 7, 9, 2, 3, 8]  # 8 and 9 are the ends
    assert inputs.sample_index.tolist() == [0, 0, 0, 1, 1, 1]
    # Outputs are [positions, samples]: those at 0, 2, 3 of the first row and at 1, 2, 3 of the second.
    assert inputs.output_index.tolist() == [0, 4, 6, 3, 5, 7]


def test_with_ends_packed_samples_enter_whole_and_their_last_outputs_are_for_their_ends() -> None:
    schedule = replace(PACKED_WITH_ENDS, length_multiple=3)
    inputs = two_samples().micro_batch(MicroBatch(rows=(1, 0), padded_length=15), schedule)
    assert inputs.input_ids.tolist() == [[20, 21, 22, 23, 0, 0, 10, 11, 12, 13, 0, 0, 0, 0, 0]]
    assert inputs.packed_index.tolist() == [5, 7, 9, 2, 3, 8]  # 8 and 9 are the ends
    assert inputs.output_index.tolist() == [0, 2, 3, 7, 8, 9]
    assert inputs.packing is not None
    assert inputs.packing.lengths == (6, 6, 3)


@pytest.mark.parametrize("schedule", [PADDED_WITH_ENDS, PACKED_WITH_ENDS])
def test_samples_that_fit_without_their_ends_may_not_fit_with_them(schedule: Schedule) -> None:
    longest = 3 if schedule is PADDED_WITH_ENDS else 7
    with pytest.raises(ValueError, match="tokens"):
        two_samples().micro_batch(MicroBatch(rows=(0, 1), padded_length=longest), schedule)


@settings(max_examples=100)
@given(
    masks=st.lists(st.lists(st.booleans(), max_size=7), min_size=1, max_size=5),
    is_packed=st.booleans(),
    length_multiple=st.sampled_from([1, 3]),
    num_ranks=st.sampled_from([1, 2]),
    data=st.data(),
)
def test_with_ends_every_response_token_and_every_end_has_the_output_at_the_token_before_it(
    masks: list[list[bool]], is_packed: bool, length_multiple: int, num_ranks: int, data: st.DataObject
) -> None:
    """Whatever the layout and the context rank. Token i of the batch has the id i + 1, so that an output is
    known by the token that it is at."""
    masks = [[False, *mask] for mask in masks]
    lengths = [len(mask) for mask in masks]
    starts = [end - length for end, length in zip(accumulate(lengths), lengths, strict=True)]
    batch = PolicyBatch(
        {
            "input_ids": np.arange(1, sum(lengths) + 1, dtype=np.int32),
            "response_mask": np.concatenate(masks).astype(np.uint8),
        },
        lengths,
        {},
        CPU,
    )
    rows = data.draw(st.permutations(range(len(masks))))
    # Context ranks cut each sample into twice as many pieces.
    multiple = math.lcm(length_multiple, 2 * num_ranks)
    rounded = [-(-lengths[row] // multiple) * multiple for row in rows]
    layout = MicroBatchLayout.packed if is_packed else MicroBatchLayout.padded
    schedule = Schedule((), layout, multiple if is_packed else 1, with_ends=True)
    padded_length = (sum if is_packed else max)(rounded) + multiple * data.draw(st.integers(0, 1))
    found: dict[int, int] = {}  # of the tokens in the packed columns, the id at whose output their value is
    for rank in range(num_ranks):
        spec = MicroBatch(tuple(rows), padded_length)
        inputs = batch.micro_batch(spec, schedule, ContextRank(rank, num_ranks))
        assert {rows[number] for number in inputs.sample_index.tolist()} == set(rows)
        places = inputs.packed_index
        if inputs.context_index is not None:
            places = places[inputs.context_index]
        outputs = inputs.input_ids.T.flatten()[inputs.output_index].tolist()
        assert not found.keys() & set(places.tolist())
        found |= dict(zip(places.tolist(), outputs, strict=True))
    expected = {
        start + place: start + place  # the id of the token before
        for start, mask in zip(starts, masks, strict=True)
        for place, is_response in enumerate(mask)
        if is_response
    }
    ends = {
        sum(lengths) + number: start + length
        for number, (start, length) in enumerate(zip(starts, lengths, strict=True))
    }
    assert found == {**expected, **ends}


def test_a_teachers_tokens_come_with_the_scored_tokens_whatever_part_of_them_a_rank_scores() -> None:
    columns = {
        "input_ids": np.arange(10, 18, dtype=np.int32),
        "response_mask": np.array([0, 1, 1, 1, 0, 1, 1, 1], np.uint8),
        "teacher_topk_ids": np.arange(16, dtype=np.int32).reshape(8, 2),
    }
    batch = PolicyBatch(columns, [4, 4], {}, torch.device("cpu"))
    spec = MicroBatch(rows=(1, 0), padded_length=4)
    whole = batch.micro_batch(spec, Schedule(()))
    assert whole.topk_ids is not None and whole.topk_ids.dtype == torch.int64
    assert whole.packed_index.tolist() == [5, 6, 7, 1, 2, 3]
    assert whole.topk_ids[:, 0].tolist() == [10, 12, 14, 2, 4, 6]
    for rank in (0, 1):
        part = batch.micro_batch(spec, Schedule(()), ContextRank(rank, 2))
        assert part.topk_ids is not None and part.context_index is not None
        assert torch.equal(part.topk_ids, whole.topk_ids[part.context_index])


def test_outputs_of_micro_batches_are_packed_at_the_places_of_their_tokens() -> None:
    batch = two_samples()
    inputs = batch.micro_batch(MicroBatch(rows=(1, 0), padded_length=4), Schedule(()))
    num_scored = len(inputs.packed_index)
    packed = empty_outputs(LogprobSettings(temperature=1.0, top_k=2), batch.num_tokens, batch.device)
    assert [(tensor.dtype, tensor.ndim) for tensor in packed] == [
        (torch.float32, 1),
        (torch.float32, 2),
        (torch.int32, 2),
    ]
    ids = torch.arange(1, 2 * num_scored + 1).view(-1, 2)
    keep_outputs(packed, (ids[:, 0].float(), ids.float(), ids), inputs)
    mask = batch.columns["response_mask"].bool()
    assert torch.equal(packed[0] > 0, mask)
    assert packed[2][inputs.packed_index].tolist() == ids.tolist()
    assert len(empty_outputs(None, 3, batch.device)) == 1
    with_entropy = LogprobSettings(temperature=1.0, with_entropy=True, top_k=2)
    assert [one.shape for one in empty_outputs(with_entropy, 3, batch.device)] == [(3,), (3,), (3, 2), (3, 2)]
