from __future__ import annotations

import numpy as np

from nemo_like.generation.interface import GroupResult, Response
from nemo_like.rollout.flatten import flatten


def _response(tokens: list[int], logprobs: list[float], is_truncated: bool = False) -> Response:
    return Response(np.array(tokens, np.int32), np.array(logprobs, np.float32), is_truncated)


def _flat():
    groups = [
        GroupResult("a", (_response([7], [-0.5]), _response([8, 1], [-1.0, -2.0])), policy_version=3),
        GroupResult(
            "b", (_response([9, 9, 9], [-3.0, -4.0, -5.0], True), _response([1], [-6.0])), policy_version=3
        ),
    ]
    return flatten(prompts=[[4, 5], [6]], groups=groups, rewards=[[1.0, 0.0], [None, 0.5]])


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
    assert tags["is_truncated"] == [False, False, True, False]
    assert tags["policy_version"] == [3, 3, 3, 3]
