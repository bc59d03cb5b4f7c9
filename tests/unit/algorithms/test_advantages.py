from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.algorithms.advantages import (
    baseline_reward_metrics,
    group_baselines,
    group_relative_advantages,
)


def advantages(rewards, group_ids, *, normalize=True, leave_one_out=False, sample_mask=None):
    return group_relative_advantages(
        rewards,
        group_ids,
        normalize_rewards=normalize,
        use_leave_one_out_baseline=leave_one_out,
        sample_mask=sample_mask,
    )


def test_reward_minus_group_mean_is_divided_by_the_unbiased_std():
    # mean 1/4; unbiased variance (9/16 + 3 * 1/16) / 3 = 1/4, std 1/2.
    result = advantages([1.0, 0.0, 0.0, 0.0], ["a"] * 4)
    assert result == pytest.approx([0.75 / 0.500001, -0.25 / 0.500001, -0.25 / 0.500001, -0.25 / 0.500001])


def test_epsilon_is_added_to_the_std():
    # std of [0, 2e-6] is sqrt(2) * 1e-6, so the epsilon of 1e-6 is clearly visible.
    assert advantages([0.0, 2e-6], ["a", "a"]) == pytest.approx(
        [-1 / (math.sqrt(2) + 1), 1 / (math.sqrt(2) + 1)]
    )


def test_without_normalisation_only_the_mean_is_subtracted():
    assert advantages([1.0, 0.0, 0.0, 0.0], ["a"] * 4, normalize=False) == [0.75, -0.25, -0.25, -0.25]


def test_groups_may_be_interleaved():
    # group a: [1, 3], mean 2, std sqrt(2); group b: [10, 10], uniform.
    result = advantages([1.0, 10.0, 3.0, 10.0], ["a", "b", "a", "b"])
    assert result == pytest.approx([-1 / (math.sqrt(2) + 1e-6), 0.0, 1 / (math.sqrt(2) + 1e-6), 0.0])


def test_leave_one_out_compares_with_the_mean_of_the_others():
    result = advantages([1.0, 0.0, 0.0, 0.0], [7] * 4, normalize=False, leave_one_out=True)
    assert result == pytest.approx([1.0, -1 / 3, -1 / 3, -1 / 3])


def test_normalised_leave_one_out_uses_the_std_of_the_others():
    # The first sample's others are uniform, so its 1 is not divided; the others see [1, 0, 0]:
    # mean 1/3, unbiased variance (4/9 + 1/9 + 1/9) / 2 = 1/3.
    result = advantages([1.0, 0.0, 0.0, 0.0], [7] * 4, leave_one_out=True)
    expected = -(1 / 3) / (math.sqrt(1 / 3) + 1e-6)
    assert result == pytest.approx([1.0, expected, expected, expected])


@pytest.mark.parametrize("value", [0.0, 1.0, 0.1, 1 / 3, 1e-300])
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_identical_rewards_give_exactly_zero_advantage(value, leave_one_out):
    # Forty-nine equal values are a case where sum / count need not give the value back.
    assert advantages([value] * 49, ["a"] * 49, leave_one_out=leave_one_out) == [0.0] * 49


def test_a_group_of_one_has_zero_advantage():
    assert advantages([5.0], ["a"]) == [0.0]
    assert advantages([5.0], ["a"], leave_one_out=True) == [0.0]


def test_leave_one_out_with_two_samples_is_not_divided():
    # One other sample has no std.
    assert advantages([1.0, 0.0], ["a", "a"], leave_one_out=True) == [1.0, -1.0]


def test_masked_samples_get_zero_and_do_not_move_the_group():
    # Without the 100 the group is [1, 3]: mean 2.
    result = advantages([1.0, 100.0, 3.0], ["a"] * 3, normalize=False, sample_mask=[1, 0, 1])
    assert result == [-1.0, 0.0, 1.0]


def test_a_masked_reward_may_be_nan():
    result = advantages([1.0, math.nan, 3.0], ["a"] * 3, normalize=False, sample_mask=[1, 0, 1])
    assert result == [-1.0, 0.0, 1.0]


def test_the_only_unmasked_sample_of_a_group_has_zero_advantage():
    assert advantages([1.0, 0.0], ["a", "a"], sample_mask=[1, 0]) == [0.0, 0.0]


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_an_unmasked_reward_that_is_not_finite_is_an_error_naming_the_sample(reward):
    with pytest.raises(ValueError, match=r"reward of sample 1 is (nan|inf); mask the sample"):
        advantages([1.0, reward], ["a", "a"])


def test_unequal_lengths_are_an_error():
    with pytest.raises(ValueError, match="2 rewards, 1 group ids"):
        advantages([1.0, 2.0], ["a"])


def test_an_empty_batch_gives_nothing():
    assert advantages([], []) == []
    assert baseline_reward_metrics([], []) == {}


def test_baselines_carry_mean_and_std_per_sample():
    baselines = group_baselines([1.0, 0.0, 0.0, 0.0], ["a"] * 4, use_leave_one_out_baseline=False)
    assert baselines.mean == (0.25,) * 4
    assert baselines.std == (0.5,) * 4


def test_baseline_metrics_count_samples_of_unsolved_solved_and_mixed_groups():
    # Group a never right (2 samples), b always (1), c mixed (2).
    metrics = baseline_reward_metrics([0.0, 0.0, 1.0, 1.0, 0.0], ["a", "a", "b", "c", "c"])
    assert metrics == pytest.approx(
        {
            "baseline_reward/pct_0": 40.0,
            "baseline_reward/pct_1": 20.0,
            "baseline_reward/pct_mixed": 40.0,
            "baseline_reward/pct_uniform": 60.0,
            "reward_std": 0.5 / 2**0.5,  # of groups with 0 and 1 / sqrt(2)
        }
    )


def test_equal_rewards_that_are_neither_0_nor_1_are_not_mixed():
    rewards = [0.1] * 126 + [0.1, 1.1, 0.1, 1.1]
    metrics = baseline_reward_metrics(rewards, [i // 2 for i in range(130)])
    assert metrics["baseline_reward/pct_uniform"] == pytest.approx(100 * 126 / 130)
    assert metrics["baseline_reward/pct_mixed"] == pytest.approx(100 * 4 / 130)
    assert metrics["baseline_reward/pct_0"] == metrics["baseline_reward/pct_1"] == 0
    assert metrics["reward_std"] == pytest.approx(2 * 2**-0.5 / 65)


def test_rewards_that_cancel_out_are_mixed_and_not_all_0():
    metrics = baseline_reward_metrics([-1.0, 1.0, 0.0, 2.0], ["a", "a", "b", "b"])
    assert metrics["baseline_reward/pct_mixed"] == 100
    assert metrics["baseline_reward/pct_0"] == metrics["baseline_reward/pct_1"] == 0


def test_groups_of_one_have_no_spread():
    metrics = baseline_reward_metrics([0.0, 0.3, 1.0], ["a", "b", "c"])
    assert metrics["baseline_reward/pct_uniform"] == 100
    assert "reward_std" not in metrics


def test_baseline_metrics_leave_masked_samples_out():
    metrics = baseline_reward_metrics([0.0, 1.0, 1.0], ["a", "a", "b"], sample_mask=[1, 0, 1])
    assert metrics["baseline_reward/pct_0"] == 50.0
    assert metrics["baseline_reward/pct_1"] == 50.0


batches = st.lists(
    st.tuples(st.floats(-100, 100), st.integers(0, 3)), min_size=1, max_size=24
)  # (reward, group id)


@given(batches)
def test_advantages_of_a_group_sum_to_zero(batch):
    rewards, group_ids = zip(*batch, strict=True)
    result = advantages(rewards, group_ids, normalize=False)
    for group in set(group_ids):
        total = sum(value for value, group_id in zip(result, group_ids, strict=True) if group_id == group)
        assert total == pytest.approx(0.0, abs=1e-9)


@given(batches, st.randoms(use_true_random=False), st.booleans(), st.booleans())
def test_the_order_of_the_samples_does_not_matter(batch, random, normalize, leave_one_out):
    order = list(range(len(batch)))
    random.shuffle(order)
    rewards, group_ids = zip(*batch, strict=True)
    result = advantages(rewards, group_ids, normalize=normalize, leave_one_out=leave_one_out)
    shuffled = advantages(
        [rewards[i] for i in order],
        [group_ids[i] for i in order],
        normalize=normalize,
        leave_one_out=leave_one_out,
    )
    assert shuffled == pytest.approx([result[i] for i in order], rel=1e-9, abs=1e-9)


@given(st.lists(st.integers(-8, 8), min_size=2, max_size=16), st.integers(-8, 8))
def test_adding_a_constant_to_a_group_changes_nothing(rewards, constant):
    group_ids = ["a"] * len(rewards)
    shifted = advantages([float(r + constant) for r in rewards], group_ids)
    assert shifted == pytest.approx(advantages([float(r) for r in rewards], group_ids), abs=1e-9)
