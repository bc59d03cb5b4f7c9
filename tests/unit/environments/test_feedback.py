from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from nemo_like.environments.feedback import as_number, checked
from nemo_like.environments.interface import Failure, FailureKind, Feedback
from tests.unit.environments.asking import judge

SURROGATE = chr(0xDC80)
NUMBERS = [True, 1, 1.0, Fraction(1), np.float32(1), np.int64(1), np.bool_(True), np.array(1.0)]


@pytest.mark.parametrize("one", NUMBERS, ids=lambda one: type(one).__name__)
def test_numbers_of_numpy_count_wherever_python_s_own_do(one: Any) -> None:
    feedback = checked(Feedback({"a": one}, is_done=one, metrics={"b": one}))
    assert feedback == Feedback({"a": 1.0}, metrics={"b": 1.0})
    assert {type(feedback.rewards["a"]), type(feedback.metrics["b"])} == {float}
    assert type(feedback.is_done) is bool


@pytest.mark.parametrize("other", ["1.0", None, 1j, [1.0], np.array([1.0]), np.str_("1"), np.complex64(1)])
def test_what_is_no_single_real_number_is_no_number(other: Any) -> None:
    assert as_number(other) is None


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Feedback({"a": None}), "the reward 'a' is None, not a number"),  # type: ignore[dict-item]
        (Feedback({"a": "high"}), "the reward 'a' is 'high', not a number"),  # type: ignore[dict-item]
        (Feedback({1: 1.0}), "the name of a reward is 1, not text"),  # type: ignore[dict-item]
        (Feedback([1.0]), "the rewards are [1.0], not a mapping"),  # type: ignore[arg-type]
        (Feedback(1.0), "the rewards are 1.0, not a mapping"),  # type: ignore[arg-type]
        (Feedback(metrics={"m": "x"}), "the metric 'm' is 'x', not a number"),  # type: ignore[dict-item]
        (Feedback(metrics={"reward": 1.0}), "the metric 'reward' has a name that every environment has"),
        (Feedback(metrics={"num_failed_rewards/died": 1.0}), "has a name that every environment has already"),
        (Feedback(observation=b"x", is_done=False), "the observation is b'x', not text"),  # type: ignore[arg-type]
        (Feedback(observation=SURROGATE, is_done=False), "which UTF-8 cannot encode"),
        (Feedback({SURROGATE: 1.0}), "which UTF-8 cannot encode"),
        (Feedback(is_done="no"), "is_done is 'no', not true or false"),  # type: ignore[arg-type]
        (Feedback(is_done=False), "the environment is not done but has no observation"),
        (Feedback(failure="no"), "failure is 'no', not a Failure"),  # type: ignore[arg-type]
        (1.0, "the environment gave 1.0, not a Feedback"),
        (None, "the environment gave None, not a Feedback"),
    ],
)
def test_a_malformed_answer_is_a_failed_one_that_says_what_is_wrong(answer: object, reason: str) -> None:
    failure = checked(answer).failure
    assert failure is not None
    assert failure.kind is FailureKind.malformed
    assert reason in failure.reason


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e39, np.float64("nan"), 10**400])
def test_numbers_that_float32_does_not_hold_fail_the_sample_in_rewards_and_in_metrics(value: Any) -> None:
    for answer in (Feedback({"a": value}), Feedback({"a": 1.0}, metrics={"m": value})):
        failure = checked(answer).failure
        assert failure is not None
        assert failure.kind is FailureKind.not_finite


def test_a_reason_that_utf_8_cannot_encode_can_still_be_written_down() -> None:
    feedback = checked(Feedback(failure=Failure(FailureKind.raised, f"no {SURROGATE}")))
    assert feedback.failure == Failure(FailureKind.raised, "no ?")


def test_feedback_that_is_well_formed_stays_as_it_is() -> None:
    state = {"moves": 1}
    answer = Feedback({"a": 0.5}, observation="go on", is_done=False, metrics={"m": 2.0}, state=state)
    assert checked(answer) == answer


MODULE = "tests.unit.environments.reward_functions"


@pytest.mark.parametrize(
    "function", ["python_number", "numpy_number", "numpy_bool", "zero_dimensional", "named", "awaited"]
)
def test_a_function_may_return_numbers_of_any_kind(function: str) -> None:
    feedback = checked(judge("function", "640", "640", function=f"{MODULE}:{function}"))
    assert feedback == Feedback({"reward": 1.0})


def test_a_function_that_raises_costs_its_turn_alone() -> None:
    feedback = judge("function", "x", function=f"{MODULE}:raising")
    assert feedback.failure == Failure(FailureKind.raised, "the reward raised KeyError: 'no such answer'")


def test_a_function_without_a_result_is_named() -> None:
    feedback = judge("function", "x", function=f"{MODULE}:forgetful")
    assert feedback.failure is not None
    assert "forgetful returned NoneType, not a number, mapping or Feedback" in feedback.failure.reason
