from __future__ import annotations

import math

import pytest

from nemo_like.tripwires.measured import Measured
from nemo_like.tripwires.rollout_checks import judged_alarms, log_chance, rollout_alarms

HEALTHY = {
    Measured.num_seeds: 1024.0,
    Measured.num_repeated_seeds: 0.0,
    Measured.num_unended_responses: 0.0,
    Measured.num_misplaced_answers: 0.0,
    Measured.num_impossible_logprobs: 0.0,
    Measured.num_equal_neighbours: 230.0,
    Measured.expected_equal_neighbours: 236.5,
}


def tripped(**changes: float) -> list[str]:
    return [alarm.tripwire for alarm in rollout_alarms({**HEALTHY, **changes})]


def test_a_healthy_rollout_trips_nothing_and_neither_does_what_was_not_measured() -> None:
    assert tripped() == []
    assert list(rollout_alarms({})) == []


@pytest.mark.parametrize(
    ("count", "tripwire"),
    [
        ("num_repeated_seeds", "seeds"),
        ("num_unended_responses", "response_ends"),
        ("num_misplaced_answers", "rewards"),
        ("num_impossible_logprobs", "finite"),
    ],
)
def test_one_is_enough_where_there_must_be_none(count: str, tripwire: str) -> None:
    assert tripped(**{count: 1.0}) == [tripwire]


def test_the_message_has_the_numbers() -> None:
    (alarm,) = rollout_alarms({**HEALTHY, Measured.num_repeated_seeds: 768.0})
    assert alarm.ends_run
    assert alarm.wrong.startswith("768 of 1024 responses were sampled with a seed that another")


def test_chance_is_chernoffs_bound() -> None:
    assert log_chance(5, 5) == log_chance(3, 5) == 0.0
    assert log_chance(20, 10) == pytest.approx(20 - 10 + 20 * math.log(0.5))
    assert log_chance(1, 0) == -math.inf


def test_responses_may_be_equal_as_often_as_their_probabilities_say() -> None:
    # 236.5 expected: 300 or more have a chance of at most e^-7.9, 400 or more of e^-46.7.
    assert tripped(num_equal_neighbours=300.0) == []
    assert tripped(num_equal_neighbours=400.0) == ["constant_generation"]


def test_the_samples_without_a_reward_and_no_others_count_as_not_judged() -> None:
    assert list(judged_alarms(3, 3)) == []
    (alarm,) = judged_alarms(700, 0)
    assert alarm.wrong == "700 samples count as not judged, but 0 have no reward"
