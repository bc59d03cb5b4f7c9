from __future__ import annotations

import pytest

from nemo_like.environments.kinds.calculator import evaluate
from tests.unit.environments.asking import ask, judge, turn


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("12 + 30", "42"),
        ("2 * (3 - 5)", "-4"),
        ("7 / 2", "3.5"),
        ("6 / 2", "3"),
        ("7 // 2", "3"),
        ("7 % 4", "3"),
        ("2 ** 10", "1024"),
        ("-(-3)", "3"),
        ("1 / 0", "error: division by zero"),
        ("2 ** 1000", "error: an exponent above 64"),
        ("9 ** 64 ** 2", "error: an exponent above 64"),
        ("1e999", "error: the result is out of range"),
        ("(-1) ** 0.5", "error: the result is out of range"),
        ("2 +", "error: no expression"),
        ("", "error: no expression"),
        ("__import__('os')", "error: only numbers, + - * / // % ** and parentheses"),
        ("'a' * 3", "error: only numbers, + - * / // % ** and parentheses"),
        ("True", "error: only numbers, + - * / // % ** and parentheses"),
        ("1+" * 150 + "1", "error: more than 200 characters"),
    ],
)
def test_an_expression_is_evaluated_or_refused(expression, value):
    assert evaluate(expression) == value


def test_the_last_call_of_a_response_is_answered_and_the_conversation_goes_on():
    said = "<calculator>1+1</calculator> and <calculator>2*3</calculator>"
    (feedback,) = ask("calculator", turn(said, "6", is_last=False))
    assert feedback.observation == "<result>6</result>"
    assert not feedback.is_done
    assert feedback.reward == 0.0
    assert feedback.metrics == {"calls_per_turn": 1.0}


def test_a_call_in_the_last_turn_earns_nothing_and_ends():
    (feedback,) = ask("calculator", turn("<calculator>2*3</calculator>", "6", is_last=True))
    assert feedback.is_done
    assert feedback.reward == 0.0


@pytest.mark.parametrize(("response", "reward"), [("6", 1.0), (" 6 ", 1.0), ("7", 0.0), ("", 0.0)])
def test_a_response_without_a_call_is_the_answer(response, reward):
    feedback = judge("calculator", response, "6")
    assert feedback.is_done
    assert feedback.rewards == {"correct": reward}


def test_a_truncated_answer_is_none():
    assert ask("calculator", turn("6", "6", is_truncated=True))[0].reward == 0.0
