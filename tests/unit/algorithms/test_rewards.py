from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.algorithms.options import RewardScalingConfig, RewardShapingConfig
from nemo_like.algorithms.rewards import ResponseEnds, informative_groups, scaled_rewards, shaped_rewards

SCALING = RewardScalingConfig(
    enabled=True, source_min=0.0, source_max=4.0, target_min=-1.0, target_max=1.0, clamp=True
)
SHAPING = RewardShapingConfig(
    enabled=True,
    max_response_length=None,
    overlong_buffer_length=20,
    overlong_buffer_penalty=0.5,
    stop_properly_penalty_coef=None,
)


def ends(tokens, truncated=None, limits=None):
    return ResponseEnds(
        num_response_tokens=tokens,
        is_truncated=truncated or [0] * len(tokens),
        max_response_tokens=limits or [100] * len(tokens),
    )


def test_scaling_maps_one_range_linearly_to_another():
    assert scaled_rewards([0.0, 1.0, 2.0, 4.0], SCALING) == [-1.0, -0.5, 0.0, 1.0]


def test_scaling_clamps_what_is_outside_the_source_range():
    assert scaled_rewards([-3.0, 9.0], SCALING) == [-1.0, 1.0]


def test_scaling_without_clamp_goes_on_linearly():
    assert scaled_rewards([-2.0, 6.0], replace(SCALING, clamp=False)) == [-2.0, 2.0]


def test_scaling_that_is_off_changes_nothing():
    assert scaled_rewards([7.0, -3.0], replace(SCALING, enabled=False)) == [7.0, -3.0]


def test_a_nan_of_a_failed_reward_does_not_spread():
    scaled = scaled_rewards([1.0, math.nan, 4.0], replace(SCALING, clamp=False))
    assert [scaled[0], scaled[2]] == [-0.5, 1.0]


def test_the_overlong_penalty_grows_linearly_over_the_buffer():
    # Nothing up to 80 tokens, half of it at 90, all of it at 100, and no more beyond.
    shaped = shaped_rewards([1.0] * 6, ends([1, 80, 81, 90, 100, 150]), SHAPING)
    assert shaped == pytest.approx([1.0, 1.0, 1.0 - 0.025, 0.75, 0.5, 0.5])


def test_each_sample_has_the_limit_of_its_own_task():
    shaped = shaped_rewards([1.0] * 3, ends([95, 95, 290], limits=[100, 300, 300]), SHAPING)
    assert shaped == pytest.approx([1.0 - 0.5 * 15 / 20, 1.0, 1.0 - 0.5 * 10 / 20])


def test_the_overlong_penalty_takes_from_bad_rewards_too():
    assert shaped_rewards([0.0, -1.0], ends([100, 100]), SHAPING) == [-0.5, -1.5]


def test_truncated_responses_keep_a_share_of_what_they_earned():
    cfg = replace(SHAPING, overlong_buffer_length=None, stop_properly_penalty_coef=0.25)
    shaped = shaped_rewards([1.0, 1.0, -1.0, 0.0], ends([5] * 4, [0, 1, 1, 1]), cfg)
    # Being cut off must not soften a bad reward.
    assert shaped == [1.0, 0.25, -1.0, 0.0]


def test_both_penalties_apply_one_after_the_other():
    cfg = replace(SHAPING, stop_properly_penalty_coef=0.5)
    # 1 - 0.5 for the length, half of that for not stopping.
    assert shaped_rewards([1.0], ends([100], [1]), cfg) == [0.25]


def test_truncated_everywhere_is_shaped_everywhere():
    cfg = replace(SHAPING, overlong_buffer_length=None, stop_properly_penalty_coef=0.0)
    assert shaped_rewards([1.0, 0.5], ends([9, 9], [1, 1]), cfg) == [0.0, 0.0]


def test_shaping_that_is_off_changes_nothing():
    assert shaped_rewards([1.0], ends([150], [1]), replace(SHAPING, enabled=False)) == [1.0]


@given(st.lists(st.tuples(st.floats(-5, 5), st.integers(0, 300)), max_size=10))
def test_the_penalty_is_never_negative_and_never_above_its_maximum(batch):
    rewards, tokens = [reward for reward, _ in batch], [count for _, count in batch]
    for before, after in zip(rewards, shaped_rewards(rewards, ends(tokens), SHAPING), strict=True):
        assert before - 0.5 - 1e-12 <= after <= before


def test_groups_with_two_different_rewards_are_informative():
    rewards = [1.0, 1.0, 0.0, 1.0, 0.0, 0.0]
    assert informative_groups(rewards, [7, 7, 8, 8, 9, 9], [1] * 6) == [8]


def test_a_group_of_one_says_nothing():
    assert informative_groups([1.0], ["a"], [1]) == []


def test_a_masked_sample_makes_no_group_informative():
    assert informative_groups([1.0, math.nan, 1.0], ["a"] * 3, [1, 0, 1]) == []
    assert informative_groups([1.0, math.nan, 0.0], ["a"] * 3, [1, 0, 1]) == ["a"]


def test_all_uniform_leaves_no_group():
    assert informative_groups([0.0, 0.0, 1.0, 1.0], [1, 1, 2, 2], [1] * 4) == []
