from __future__ import annotations

import math

import pytest

from nemo_like.tripwires.batch_checks import (
    advantage_alarms,
    count_alarms,
    expected_counts,
    group_alarms,
    mask_alarms,
    sample_alarms,
    trained_token_alarms,
    truncation_alarms,
    uniform_group_alarms,
)


def test_a_group_is_one_prompt_in_whatever_order() -> None:
    assert list(group_alarms([4, 5, 4, 5], [0, 1, 0, 1])) == []
    (alarm,) = group_alarms([4, 4, 5, 5], [0, 1, 0, 1])
    assert "2 prompts and 2 group ids occur in 4 combinations" in alarm.wrong


def test_two_prompts_cannot_be_one_group() -> None:
    assert len(list(group_alarms([0, 0], [0, 1]))) == 1


def test_advantages_may_differ_by_rounding_alone() -> None:
    assert list(advantage_alarms([1.5, -0.5], [1.5 + 1e-7, -0.5])) == []
    (alarm,) = advantage_alarms([1.5, -0.5, 2.0], [1.5, 0.5, 2.5])
    assert "2 of 3 advantages" in alarm.wrong
    assert "sample 1 has -0.5, not 0.5" in alarm.wrong


def test_an_advantage_that_is_no_number_is_wrong() -> None:
    assert len(list(advantage_alarms([math.nan], [0.0]))) == 1


def test_ones_own_estimator_is_not_judged() -> None:
    assert list(advantage_alarms([7.0], None)) == []


def test_a_sample_trains_exactly_where_it_was_judged_and_no_stage_says_why_not() -> None:
    judged, reasons = [True, True, False], [None, "overlong", "reward_failed"]
    assert list(mask_alarms([1.0, 0.0, 0.0], judged, reasons)) == []
    (unjudged,) = mask_alarms([1.0, 0.0, 1.0], judged, [None, "overlong", None])
    assert unjudged.wrong == "1 samples train that were not judged"
    (unexplained,) = mask_alarms([0.0, 1.0, 0.0], judged, reasons)
    assert unexplained.wrong == "2 samples are masked without a reason, or train in spite of one"
    assert unjudged.tripwire == unexplained.tripwire == "masks"


def test_no_truncated_sample_trains_where_they_are_filtered() -> None:
    assert list(truncation_alarms([True, False], [0.0, 1.0])) == []
    assert len(list(truncation_alarms([True, False], [1.0, 1.0]))) == 1


def test_dynamic_sampling_keeps_groups_with_different_rewards() -> None:
    assert list(uniform_group_alarms([0.0, 1.0, 1.0, 0.0], [0, 0, 1, 1], [1.0] * 4)) == []
    (alarm,) = uniform_group_alarms([0.0, 1.0, 1.0, 0.0], [0, 0, 1, 1], [1.0, 1.0, 1.0, 0.0])
    assert alarm.wrong.startswith("1 of 2 groups")


def test_an_update_counts_the_tokens_and_samples_that_train() -> None:
    assert expected_counts([3, 4, 5, 6], [1.0, 0.0, 1.0, 1.0], 2) == [(3, 1), (11, 2)]


@pytest.mark.parametrize("wrong", [[(3, 1), (12, 2)], [(3, 2), (11, 2)], [(3, 1)], []])
def test_every_replica_divides_by_the_global_counts(wrong: list[tuple[int, int]]) -> None:
    expected = [(3, 1), (11, 2)]
    assert list(count_alarms([expected, expected], expected)) == []
    (alarm,) = count_alarms([expected, wrong], expected)
    assert "of replica 1 is normalised by" in alarm.wrong


def test_idle_samples_need_not_train() -> None:
    assert list(trained_token_alarms(80.0, 70, 90)) == []
    assert list(trained_token_alarms(None, 70, 90)) == []
    (alarm,) = trained_token_alarms(91.0, 70, 90)
    assert alarm.wrong == "91 tokens trained; by the tags it should be 70 to 90"
    assert len(list(trained_token_alarms(69.0, 70, 90))) == 1


def test_one_wrong_sample_is_an_alarm() -> None:
    assert list(sample_alarms(0.0)) == []
    assert len(list(sample_alarms(1.0))) == 1
