"""What a judge is asked, and how its verdicts are read."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.data.interface import Message
from nemo_like.environments.interface import FailureKind
from nemo_like.environments.judge import NoVerdict, filled, prompt_text, reward_of, winner_of
from nemo_like.environments.kinds.judge import JudgeOptions
from nemo_like.environments.registry import options_of
from tests.unit.environments.configs import env_config

CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}


def options(**changes: object) -> JudgeOptions:
    typed = options_of(env_config("judge", options={"base_url": "http://a", "model": "m", **changes}))
    assert isinstance(typed, JudgeOptions)
    return typed


def test_values_are_filled_in_at_once_and_other_braces_stay() -> None:
    question = 'judge {response} of {prompt} as {"score": {n}}'
    values = {"prompt": "{response}", "response": "{prompt} {x}"}
    assert filled(question, values) == 'judge {prompt} {x} of {response} as {"score": {n}}'


@given(st.text(), st.text())
def test_any_text_reaches_the_judge_as_it_is(prompt: str, response: str) -> None:
    values = {"prompt": prompt, "response": response}
    assert filled("{response}\n{prompt}", values) == f"{response}\n{prompt}"


@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("plain", "plain"),
        ((Message("user", "hello"),), "hello"),
        ((Message("system", "be brief"), Message("user", "hello")), "system: be brief\n\nuser: hello"),
        (
            (Message("user", "1+2?"), Message("assistant", "", {"tool_calls": [CALL]})),
            'user: 1+2?\n\nassistant: {"name": "add", "arguments": {"a": 1, "b": 2}}',
        ),
    ],
)
def test_a_prompt_of_messages_is_text_to_the_judge(prompt: str | tuple[Message, ...], text: str) -> None:
    assert prompt_text(prompt) == text


@pytest.mark.parametrize(
    ("verdict", "reward"),
    [
        ("score: 0", 0.0),
        ("score: 10", 1.0),
        ("score: 2.5", 0.25),
        ("first I thought score: 9, but no.\nscore: 3", 0.3),
        ("**score: 7**", 0.7),
    ],
)
def test_the_last_score_is_mapped_to_0_to_1(verdict: str, reward: float) -> None:
    assert reward_of(verdict, options()) == pytest.approx(reward)


def test_the_range_of_scores_may_begin_anywhere() -> None:
    five = options(min_score=1.0, max_score=5.0)
    assert [reward_of(f"score: {score}", five) for score in (1, 2, 3, 5)] == [0.0, 0.25, 0.5, 1.0]
    both = options(min_score=-2.0, max_score=2.0)
    assert reward_of("score: -1", both) == 0.25


def test_a_field_of_json_is_found_by_its_pattern() -> None:
    of_json = options(score_pattern=r'"score":\s*(\d+)')
    assert reward_of('```json\n{"reason": "well", "score": 8}\n```', of_json) == 0.8


@pytest.mark.parametrize(
    ("verdict", "pattern", "reason"),
    [
        ("I cannot say", None, "finds nothing in it; it ends with 'I cannot say'"),
        ("", None, "finds nothing in it"),
        ("score: 11", None, "its score 11 is not from 0 to 10"),
        ("score: -1", None, "its score -1 is not from 0 to 10"),
        ("score: high", "score: (.*)", "its score 'high' is no number"),
        ("score: nan", "score: (.*)", "its score nan is not from 0 to 10"),
    ],
)
def test_a_verdict_without_a_score_in_its_range_cannot_be_read(
    verdict: str, pattern: str | None, reason: str
) -> None:
    changed = {} if pattern is None else {"score_pattern": pattern}
    with pytest.raises(NoVerdict) as raised:
        reward_of(verdict, options(**changed))
    assert raised.value.kind is FailureKind.malformed
    assert reason in str(raised.value)


@pytest.mark.parametrize(("verdict", "winner"), [("[[A]] no, [[B]]", "B"), ("so [[c]]", "C")])
def test_the_last_verdict_on_a_pair_counts(verdict: str, winner: str) -> None:
    assert winner_of(verdict, r"\[\[(.)\]\]") == winner


@pytest.mark.parametrize("verdict", ["both are fine", "[[D]]"])
def test_a_verdict_that_names_neither_cannot_be_read(verdict: str) -> None:
    with pytest.raises(NoVerdict, match="cannot be read"):
        winner_of(verdict, r"\[\[(.)\]\]")
