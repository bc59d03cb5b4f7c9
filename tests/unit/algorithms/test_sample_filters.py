from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest

from nemo_like.algorithms.options import GRPOConfig
from nemo_like.algorithms.sample_filters import RolledOut, build_filter, mask_logprob_mismatch, mask_truncated

CFG: Any = None  # the section grpo, of which these filters read nothing
SAMPLES = RolledOut(
    rewards=[1.0, 0.0, 1.0, 1.0, 0.0, 1.0],
    shaped_rewards=[0.0] * 6,
    group_ids=[3, 3, 4, 4, 5, 5],
    sample_mask=[1, 1, 1, 1, 0, 1],
    num_response_tokens=[2] * 6,
    is_truncated=[False, True, False, True, False, False],
)


def easy(samples: RolledOut, cfg: GRPOConfig) -> list[bool]:
    return [reward > 0 for reward in samples.rewards]


def too_short(samples: RolledOut, cfg: GRPOConfig) -> list[bool]:
    return [True]


def nothing(samples: RolledOut, cfg: GRPOConfig) -> None:
    return None


def numbers(samples: RolledOut, cfg: GRPOConfig) -> Sequence[float]:
    return [1.0, 0.0, 0.5, 1.0, 1.0, 1.0]


def test_different_rewards_keeps_groups_whose_unmasked_rewards_differ() -> None:
    assert build_filter("different_rewards", CFG)(SAMPLES) == [True, True, False, False, False, False]


def test_not_truncated_keeps_what_ended_by_itself() -> None:
    # The fifth sample is masked already, since its reward failed.
    assert build_filter("not_truncated", CFG)(SAMPLES) == [True, False, True, False, False, True]


def test_a_filter_of_ones_own_is_found_by_import_path() -> None:
    assert build_filter(f"{__name__}:easy", CFG)(SAMPLES) == [True, False, True, True, False, True]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("too_short", "too_short gave 1 values for 6 samples; it must give one bool per sample"),
        ("nothing", "nothing gave NoneType for 6 samples"),
        ("numbers", "numbers gave 0.5 for sample 2 of group 4; it must give true or false"),
    ],
)
def test_what_a_filter_gives_is_checked(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_filter(f"{__name__}:{name}", CFG)(SAMPLES)


def test_samples_above_the_threshold_are_masked_and_counted():
    result = mask_logprob_mismatch([1.0, 1.0, 1.0], [1.0, 1.5, 1.2], threshold=1.2)
    assert result.sample_mask == (1.0, 0.0, 1.0)
    assert result.num_masked == 1


def test_a_sample_that_was_masked_before_is_not_counted_again():
    result = mask_logprob_mismatch([0.0, 1.0], [9.0, 1.0], threshold=2.0)
    assert result.sample_mask == (0.0, 1.0)
    assert result.num_masked == 0


def test_an_error_that_is_not_a_number_masks_its_sample():
    result = mask_logprob_mismatch([1.0, 1.0], [math.nan, math.inf], threshold=2.0)
    assert result.sample_mask == (0.0, 0.0)
    assert result.num_masked == 2


def test_no_threshold_masks_nothing():
    result = mask_logprob_mismatch([1.0, 0.0], [math.inf, 1.0], threshold=None)
    assert result.sample_mask == (1.0, 0.0)
    assert result.num_masked == 0


def test_unequal_lengths_are_an_error():
    with pytest.raises(ValueError, match="1 sample mask entries but 2 log-prob errors"):
        mask_logprob_mismatch([1.0], [1.0, 1.0], threshold=1.0)


def test_the_overlong_filter_masks_truncated_samples_and_counts_those_that_trained():
    masked = mask_truncated([1.0, 1.0, 0.0], [False, True, True])
    assert masked.sample_mask == (1.0, 0.0, 0.0)
    assert masked.num_masked == 1
