from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from nemo_like.batch.columns import Column, Layout
from nemo_like.data.interface import Encoded
from nemo_like.data_plane.storage_errors import ColumnMismatch
from nemo_like.environments.interface import Failure, FailureKind, Feedback
from nemo_like.generation.interface import FORCED
from nemo_like.rollout.flatten import FlatBatch, flatten
from tests.unit.rollout.conversations import conversation, finished, response, routed


def _flat() -> FlatBatch:
    """Groups 0 and 2 of a rollout, of two samples each; the third sample was cut off and has no reward."""
    first, second = (4, 5), (6,)
    failed = Feedback.failed(FailureKind.raised, "no such answer")
    return flatten(
        [
            [
                finished(first, response([7], [-0.5]), Feedback({"a": 1.0})),
                finished(first, response([8, 1], [-1.0, -2.0]), Feedback({"a": 0.0})),
            ],
            [
                finished(second, response([9, 9, 9], [-3.0, -4.0, -5.0], is_truncated=True), failed, 2),
                finished(second, response([1], [-6.0]), Feedback({"a": 0.25, "b": 0.25}), 2),
            ],
        ],
        first_group=10,
    )


def test_prompt_and_response_follow_each_other_sample_by_sample() -> None:
    flat = _flat()
    assert flat.columns["input_ids"].tolist() == [4, 5, 7, 4, 5, 8, 1, 6, 9, 9, 9, 6, 1]
    assert flat.columns["input_ids"].dtype == np.int32
    assert flat.lengths == [3, 4, 4, 2]
    assert flat.chunk_sizes == [2, 2]


def test_the_mask_marks_generated_tokens_only() -> None:
    flat = _flat()
    assert flat.columns["response_mask"].tolist() == [0, 0, 1, 0, 0, 1, 1, 0, 1, 1, 1, 0, 1]
    assert flat.columns["response_mask"].dtype == np.uint8


def test_logprobs_stand_on_their_tokens_and_are_zero_on_the_prompt() -> None:
    logprobs = _flat().columns["generation_logprobs"]
    assert logprobs.tolist() == [0, 0, -0.5, 0, 0, -1, -2, 0, -3, -4, -5, 0, -6]
    assert logprobs.dtype == np.float32


def test_a_sample_whose_reward_failed_was_not_judged() -> None:
    tags = _flat().tags
    assert tags["reward"] == [1.0, 0.0, 0.0, 0.5]
    assert tags["is_judged"] == [True, True, False, True]


def test_tags_count_tokens_and_name_the_group() -> None:
    tags = _flat().tags
    assert tags["group_id"] == [10, 10, 12, 12]
    assert tags["num_prompt_tokens"] == [2, 2, 1, 1]
    assert tags["num_response_tokens"] == [1, 2, 3, 1]
    assert tags["num_turns"] == [1, 1, 1, 1]
    assert tags["is_truncated"] == [False, False, True, False]
    assert tags["policy_version"] == [3, 3, 3, 3]


def test_observations_are_neither_masked_in_nor_given_logprobs() -> None:
    sample = conversation((4, 5), max_turns=2)
    sample.add_response(response([7, 1], [-1.0, -2.0]), "seven", 3)
    sample.add_feedback(Feedback(observation="go on", is_done=False))
    sample.add_observation("go on", Encoded((20, 21, 22)))
    sample.add_response(response([8], [-3.0]), "eight", 3)
    sample.add_feedback(Feedback({"a": 1.0}))
    flat = flatten([[sample]])
    assert flat.columns["input_ids"].tolist() == [4, 5, 7, 1, 20, 21, 22, 8]
    assert flat.columns["response_mask"].tolist() == [0, 0, 1, 1, 0, 0, 0, 1]
    assert flat.columns["generation_logprobs"].tolist() == [0, 0, -1, -2, 0, 0, 0, -3]
    assert flat.lengths == [8]
    assert flat.tags["num_response_tokens"] == [3]
    assert flat.tags["num_turns"] == [2]


CREDIT = Column("credit", "float32", Layout.per_token, inner_shape=(2,))
SCORE = Column("score", "int32", Layout.per_sample)
LEVEL = Column("level", "float32", Layout.per_sample, per_prompt=True)
NOTES = Column("notes", "", Layout.objects)
IMAGES = Column("images", "", Layout.ragged, per_prompt=True)


def test_columns_of_every_layout_go_where_they_belong() -> None:
    pixels = [np.ones((2, 2), np.uint8)]
    first = conversation((4, 5), max_turns=2, columns={"images": pixels})
    first.add_response(response([7, 1], [-1.0, -2.0]), "seven", 3)
    credit = np.array([[1, 2], [3, 4]])
    first.add_feedback(Feedback(observation="go on", is_done=False, columns={"credit": credit, "notes": "a"}))
    first.add_observation("go on", Encoded((20,)))
    first.add_response(response([8], [-3.0]), "eight", 3)
    first.add_feedback(Feedback({"a": 1.0}, columns={"notes": "b", "score": 7}))
    second = conversation((4, 5), generation=1, columns={"images": pixels})
    second.add_response(response([9], [-1.0]), "nine", 3)
    second.add_feedback(Feedback({"a": 1.0}, columns={"credit": [[5, 6]], "level": 2.5}))
    other = finished((6,), response([9]), Feedback({"a": 1.0}))
    columns = flatten([[first, second], [other]], (CREDIT, SCORE, LEVEL, NOTES, IMAGES)).columns
    none = [0, 0]
    expected = [none, none, [1, 2], [3, 4], none, none, none, none, [5, 6], none, none]
    assert np.asarray(columns["credit"]).tolist() == expected
    assert np.asarray(columns["score"]).tolist() == [7, 0, 0]
    assert np.asarray(columns["level"]).tolist() == [2.5, 0.0]
    assert columns["notes"] == ["b", None, None]
    assert [[image.shape for image in images] for images in columns["images"]] == [[(2, 2)], []]
    assert [np.asarray(columns[name]).dtype for name in ("credit", "score", "level")] == [
        np.float32,
        np.int32,
        np.float32,
    ]


def test_what_an_engine_brings_stands_on_its_tokens() -> None:
    answered = response([7, 1])
    object.__setattr__(answered, "columns", {"credit": [[1, 2], [3, 4]]})
    columns = flatten([[finished((4,), answered, Feedback({"a": 1.0}))]], (CREDIT,)).columns
    assert np.asarray(columns["credit"]).tolist() == [[0, 0], [1, 2], [3, 4]]


def test_a_record_s_values_per_token_are_as_many_as_its_prompt_has() -> None:
    weights = Column("weights", "float32", Layout.per_token)
    right, wrong = (conversation((4, 5), columns={"weights": [0.5] * count}) for count in (2, 3))
    for sample in (right, wrong):
        sample.add_response(response([7]), "seven", 3)
    assert np.asarray(flatten([[right]], (weights,)).columns["weights"]).tolist() == [0.5, 0.5, 0.0]
    with pytest.raises(ColumnMismatch, match=r"has shape \[3\], where \[2\] is declared for 2 tokens"):
        flatten([[wrong]], (weights,))


def test_of_a_prompt_s_samples_the_first_that_gives_a_value_counts_and_of_its_turns_the_latest() -> None:
    silent = conversation((4,))
    silent.add_response(response([7]), "seven", 3)
    silent.add_feedback(Feedback({"a": 1.0}))
    sample = conversation((4,), generation=1, max_turns=2)
    sample.add_response(response([7]), "seven", 3)
    sample.add_feedback(Feedback(observation="go on", is_done=False, columns={"level": 1.0}))
    sample.add_observation("go on", Encoded((20,)))
    sample.add_response(response([8]), "eight", 3)
    sample.add_feedback(Feedback({"a": 1.0}, columns={"level": 9.0}))
    last = finished((4,), response([7]), Feedback({"a": 1.0}, columns={"level": 3.0}))
    assert np.asarray(flatten([[silent, sample, last]], (LEVEL,)).columns["level"]).tolist() == [9.0]


def test_a_sample_whose_image_could_not_be_read_is_its_prompt_and_does_not_train() -> None:
    failed = conversation((4, 5))
    failed.fail(Failure(FailureKind.bad_image, "a.png cannot be read"), 3)
    images = np.ones((2, 2), np.float32)
    seen = conversation((4,), position=1, columns={"images": [images]})
    seen.add_response(response([7]), "seven", 3)
    seen.add_feedback(Feedback({"a": 1.0}))
    flat = flatten([[failed], [seen]], (IMAGES,))
    assert flat.lengths == [2, 2]
    assert np.asarray(flat.columns["response_mask"]).tolist() == [0, 0, 0, 1]
    assert flat.tags["is_judged"] == [False, True]
    assert flat.tags["policy_version"] == [3, 3]
    assert flat.columns["images"] == [[], [images]]


def test_the_images_of_all_observations_of_a_sample_are_its_own() -> None:
    columns = (
        Column("pixel_values", "", Layout.ragged, per_prompt=True),
        Column("observed_pixel_values", "", Layout.ragged),
    )
    group = [conversation(max_turns=3, columns={"pixel_values": [np.array([1.0])]}) for _ in range(2)]
    for value in (2.0, 3.0):
        group[0].add_response(response([7]), "x", 3)
        group[0].add_feedback(Feedback(observation="<image>", is_done=False))
        seen = Encoded((20,), (b"png",), {"pixel_values": [np.array([value])]})
        group[0].add_observation("<image>", seen)
    for sample in group:
        sample.add_response(response([8]), "x", 3)
        sample.add_feedback(Feedback({"a": 1.0}))
    flat = flatten([group], columns)
    assert [[one.tolist() for one in values] for values in flat.columns["pixel_values"]] == [[[1.0]]]
    observed = flat.columns["observed_pixel_values"]
    assert [[one.tolist() for one in values] for values in observed] == [[[2.0], [3.0]], []]


def test_samples_of_a_group_have_their_own_routes_in_the_prompt_that_they_share() -> None:
    column = Column("routes", "uint8", Layout.per_token)
    done = Feedback({"a": 1.0})
    samples = [
        finished((4, 5), routed([7], routes=[0], context=[11, 12]), done),
        finished((4, 5), routed([8, 1], routes=[31, 0], context=[13, 14]), done),
    ]
    unanswered = conversation((4, 5))
    unanswered.fail(Failure(FailureKind.raised, "unreadable"), 3)
    flat = flatten([[*samples, unanswered]], [column])
    assert flat.columns["routes"].tolist() == [11, 12, 0, 13, 14, 31, 0, 0, 0]


def test_tokens_that_a_grammar_forced_are_no_part_of_the_mask() -> None:
    answered = replace(
        response([7, 8, 9], [-0.5, -40.0, -0.25]), columns={FORCED: np.array([0, 1, 0], np.uint8)}
    )
    flat = flatten([[finished((4,), answered, Feedback({"a": 1.0}))]])
    assert flat.columns["input_ids"].tolist() == [4, 7, 8, 9]
    assert flat.columns["response_mask"].tolist() == [0, 1, 0, 1]
    assert flat.columns["generation_logprobs"].tolist() == [0, -0.5, 0, -0.25]
    assert flat.tags["num_response_tokens"] == [2]
