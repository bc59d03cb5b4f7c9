from __future__ import annotations

import asyncio

import pytest

from nemo_like.environments.arithmetic import ArithmeticEnvironment
from nemo_like.environments.interface import Feedback, Turn


@pytest.mark.parametrize(
    ("response", "is_truncated", "reward"),
    [
        ("640", False, 1.0),
        ("640", True, 0.0),
        ("641", False, 0.0),
        ("6400", False, 0.0),
        ("64", False, 0.0),
        (" 640", False, 0.0),
        ("6<pad>40", False, 0.0),
        ("", False, 0.0),
    ],
)
def test_only_the_exact_and_ended_answer_is_rewarded(response, is_truncated, reward):
    turn = Turn(prompt="21+43=", response=response, answer="640", is_truncated=is_truncated)
    (feedback,) = asyncio.run(ArithmeticEnvironment().step([turn]))
    assert feedback.rewards == {"exact_match": reward}
    assert feedback.reward == reward
    assert feedback.is_done
    assert feedback.observation is None


def test_the_reward_is_the_sum_of_its_components():
    assert Feedback(rewards={"exact_match": 1.0, "format": 0.5}).reward == 1.5


def test_a_failed_sample_has_a_reason_and_no_reward():
    feedback = Feedback.failed("the reward raised KeyError: 'x'")
    assert feedback.reward is None
    assert feedback.failure == "the reward raised KeyError: 'x'"
