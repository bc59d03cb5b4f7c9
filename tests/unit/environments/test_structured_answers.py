"""Rewards by libraries: JSON schema, math-verify, reasoning-gym."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.lacking import REASONING_GYM
from tests.unit.environments.asking import judge

reasoning_gym = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason=REASONING_GYM)

SCHEMA = {"type": "object", "required": ["age"], "properties": {"age": {"type": "integer", "minimum": 0}}}
SUM = {"metadata": {"source_dataset": "basic_arithmetic"}}


@pytest.mark.parametrize(
    ("response", "valid", "parses"),
    [
        ('{"age": 3}', 1.0, 1.0),
        ('{"age": -1}', 0.0, 1.0),
        ('{"name": "Ann"}', 0.0, 1.0),
        ('{"age": 3', 0.0, 0.0),
        ("", 0.0, 0.0),
        ("[" * 100_000 + "]" * 100_000, 0.0, 0.0),
    ],
)
def test_json_is_rewarded_when_the_schema_accepts_it(response, valid, parses):
    feedback = judge("json_schema", response, schema=SCHEMA)
    assert feedback.rewards == {"valid": valid}
    assert feedback.metrics == {"parses": parses}


def test_an_example_may_bring_its_own_schema_as_a_mapping_or_as_text():
    assert judge("json_schema", "3", data={"schema": {"type": "integer"}}).reward == 1.0
    assert judge("json_schema", "3", data={"schema": '{"type": "string"}'}).reward == 0.0


def test_json_may_stand_in_a_fence():
    fenced = 'Here:\n```json\n{"age": 3}\n```'
    assert judge("json_schema", fenced, schema=SCHEMA).reward == 0.0
    assert judge("json_schema", fenced, schema=SCHEMA, answer_pattern="```json(.*?)```").reward == 1.0


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        (r"so it is \boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"$x = \frac{2}{4}$", r"\frac{1}{2}", 1.0),
        (r"\boxed{\sqrt{8}}", r"2\sqrt{2}", 1.0),
        (r"\boxed{3}", "4", 0.0),
        ("no idea", "4", 0.0),
    ],
)
def test_math_answers_are_compared_by_value(response, answer, reward):
    assert judge("math_verify", response, answer).rewards == {"correct": reward}


def test_a_math_answer_may_be_asked_for_in_a_certain_place():
    response = r"first \boxed{4}, then answer: $3$"
    assert judge("math_verify", response, "4", answer_pattern="answer: (.*)").reward == 0.0
    assert judge("math_verify", response, "3", answer_pattern="answer: (.*)").reward == 1.0
    assert judge("math_verify", r"\boxed{3}", "3", answer_pattern="answer: (.*)").reward == 0.0


@reasoning_gym
@pytest.mark.parametrize(("response", "reward"), [("7", 1.0), ("it is 7", 1 / 7), ("8", 0.0), ("", 0.0)])
def test_a_reasoning_gym_problem_is_scored_by_its_own_dataset(response, reward):
    # basic_arithmetic scores a longer answer that contains the right one by its share of the characters.
    assert judge("reasoning_gym", response, "7", data=SUM).rewards == {"score": pytest.approx(reward)}


@reasoning_gym
def test_a_reasoning_gym_answer_may_stand_in_a_tag():
    tagged = "4 + 3 <answer>7</answer>"
    feedback = judge("reasoning_gym", tagged, "7", data=SUM, answer_pattern="<answer>(.*?)</answer>")
    assert feedback.reward == 1.0
