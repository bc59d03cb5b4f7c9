from __future__ import annotations

import numpy as np

from nemo_like.environments.interface import FailureKind, Feedback
from nemo_like.rollout.flatten import FlatBatch, flatten
from tests.unit.rollout.conversations import conversation, finished, response


def _flat() -> FlatBatch:
    """Two groups of two; the third sample was cut off and has no reward."""
    first, second = (4, 5), (6,)
    failed = Feedback.failed(FailureKind.raised, "no such answer")
    return flatten(
        [
            [
                finished(first, response([7], [-0.5]), Feedback({"a": 1.0})),
                finished(first, response([8, 1], [-1.0, -2.0]), Feedback({"a": 0.0})),
            ],
            [
                finished(second, response([9, 9, 9], [-3.0, -4.0, -5.0], is_truncated=True), failed),
                finished(second, response([1], [-6.0]), Feedback({"a": 0.25, "b": 0.25})),
            ],
        ]
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


def test_a_failed_reward_masks_its_sample() -> None:
    tags = _flat().tags
    assert tags["reward"] == [1.0, 0.0, 0.0, 0.5]
    assert tags["sample_mask"] == [1, 1, 0, 1]


def test_tags_count_tokens_and_name_the_group() -> None:
    tags = _flat().tags
    assert tags["group_id"] == [0, 0, 1, 1]
    assert tags["num_prompt_tokens"] == [2, 2, 1, 1]
    assert tags["num_response_tokens"] == [1, 2, 3, 1]
    assert tags["num_turns"] == [1, 1, 1, 1]
    assert tags["is_truncated"] == [False, False, True, False]
    assert tags["policy_version"] == [3, 3, 3, 3]


def test_observations_are_neither_masked_in_nor_given_logprobs() -> None:
    sample = conversation((4, 5), max_turns=2)
    sample.add_response(response([7, 1], [-1.0, -2.0]), "seven", 3)
    sample.add_feedback(Feedback(observation="go on", is_done=False))
    sample.add_observation("go on", [20, 21, 22])
    sample.add_response(response([8], [-3.0]), "eight", 3)
    sample.add_feedback(Feedback({"a": 1.0}))
    flat = flatten([[sample]])
    assert flat.columns["input_ids"].tolist() == [4, 5, 7, 1, 20, 21, 22, 8]
    assert flat.columns["response_mask"].tolist() == [0, 0, 1, 1, 0, 0, 0, 1]
    assert flat.columns["generation_logprobs"].tolist() == [0, 0, -1, -2, 0, 0, 0, -3]
    assert flat.lengths == [8]
    assert flat.tags["num_response_tokens"] == [3]
    assert flat.tags["num_turns"] == [2]
