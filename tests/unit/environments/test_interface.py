from __future__ import annotations

from nemo_like.environments.interface import FailureKind, Feedback


def test_the_reward_is_the_sum_of_its_components():
    assert Feedback({"exact_match": 1.0, "format": 0.5}).reward == 1.5


def test_a_failed_sample_has_a_reason_and_no_reward():
    feedback = Feedback.failed(FailureKind.raised, "the reward raised KeyError: 'x'")
    assert feedback.reward is None
    assert feedback.failure is not None
    assert feedback.failure.reason == "the reward raised KeyError: 'x'"
