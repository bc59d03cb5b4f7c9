"""Two samples of prompt, response and, in the second, an observation between two responses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from nemo_like.tripwires.sample_checks import SampleTags, num_wrong_samples, sample_digests

IDS = np.array([5, 6, 7, 8, 5, 9, 9, 3, 4, 1], np.int32)
MASK = np.array([0, 0, 1, 1, 0, 1, 1, 0, 1, 1], np.uint8)
LOGPROBS = np.where(MASK == 1, -0.5, 0.0).astype(np.float32)
LENGTHS = [4, 6]
TAGS = SampleTags(
    lengths=LENGTHS,
    num_prompt_tokens=[2, 1],
    num_response_tokens=[2, 4],
    digests=sample_digests(IDS, LENGTHS),
)


def test_what_the_rollout_said_fits() -> None:
    assert num_wrong_samples(TAGS, IDS, MASK, LOGPROBS) == 0
    assert num_wrong_samples(TAGS, IDS, MASK) == 0
    assert num_wrong_samples(replace(TAGS, digests=None), IDS, MASK, LOGPROBS) == 0


def masked(*ones: int) -> np.ndarray:
    mask = np.zeros(10, np.uint8)
    mask[[*ones]] = 1
    return mask


@pytest.mark.parametrize(
    ("mask", "num_wrong"),
    [
        (np.roll(MASK, -1), 2),
        (masked(2, 5, 6, 8), 2),  # the last tokens are left out
        (masked(3, 6, 8, 9), 2),  # the first ones
        (masked(2, 3, 5, 6, 7, 8, 9), 1),  # the observation trains
        (masked(2, 3, 5, 6, 7, 9), 1),  # as many as there should be, but not where
    ],
)
def test_a_mask_elsewhere_is_noticed(mask: np.ndarray, num_wrong: int) -> None:
    assert num_wrong_samples(TAGS, IDS, mask, LOGPROBS) == num_wrong


@pytest.mark.parametrize(
    ("changes", "num_wrong"),
    [
        ({"digests": TAGS.digests[::-1]}, 2),
        ({"num_response_tokens": [4, 2]}, 2),
        ({"num_prompt_tokens": [1, 2]}, 2),
    ],
)
def test_tags_of_another_sample_are_noticed(changes: dict[str, Any], num_wrong: int) -> None:
    assert num_wrong_samples(replace(TAGS, **changes), IDS, MASK, LOGPROBS) == num_wrong


def test_other_tokens_are_noticed() -> None:
    swapped = IDS.copy()
    swapped[[2, 3]] = IDS[[3, 2]]
    assert num_wrong_samples(TAGS, swapped, MASK, LOGPROBS) == 1


def test_a_digest_depends_on_tokens_and_their_order_and_on_nothing_else() -> None:
    alone = sample_digests(IDS[4:], [6])
    assert sample_digests(IDS, LENGTHS)[1] == alone[0] < 2**31
    assert sample_digests(IDS.astype(np.int64), LENGTHS) == sample_digests(IDS, LENGTHS)
    assert len(set(sample_digests(np.array([1, 2, 2, 1, 1, 0], np.int32), [2, 2, 2]))) == 3


def test_a_sample_without_a_response_is_right() -> None:
    tags = SampleTags(lengths=[2], num_prompt_tokens=[2], num_response_tokens=[0])
    assert num_wrong_samples(tags, IDS[:2], MASK[:2], LOGPROBS[:2]) == 0


def test_a_session_may_begin_a_branch_right_behind_its_prompt_and_end_with_context() -> None:
    ids, mask = np.arange(6), np.array([0, 0, 0, 1, 1, 0], np.uint8)
    tags = {"lengths": [6], "num_prompt_tokens": [2], "num_response_tokens": [2]}
    assert num_wrong_samples(SampleTags(**tags), ids, mask) == 1
    assert num_wrong_samples(SampleTags(**tags, are_sessions=True), ids, mask) == 0
    assert num_wrong_samples(SampleTags(**tags, are_sessions=True), ids, 1 - mask) == 1
