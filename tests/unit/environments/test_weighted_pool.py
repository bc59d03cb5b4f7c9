"""Sums of what several environments give, worked out by hand."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from nemo_like.environments.feedback import checked
from nemo_like.environments.interface import FailureKind, Feedback, Turn
from nemo_like.environments.pool import EnvironmentPool
from nemo_like.environments.weighted_pool import weighted_pools
from tests.unit.environments.asking import turn
from tests.unit.environments.configs import env_config


@dataclass
class Actor:
    """Answers with what ``give`` returns for each turn, and remembers the sizes of its calls."""

    give: Callable[[Turn], Feedback]
    name: str = "actor"
    sizes: list[int] = field(default_factory=list)

    async def submit(self, method: str, turns: Sequence[Turn]) -> Any:
        assert method == "step"
        self.sizes.append(len(turns))
        return [self.give(one) for one in turns]


def judged(
    turns: Sequence[Turn], weights: dict[str, float], batch_size: int = 16, **actors: Actor
) -> list[Feedback]:
    env = {name: env_config("regex", options={"pattern": "x"}, batch_size=batch_size) for name in actors}
    env["sum"] = env_config("weighted_sum", options={"components": weights})
    pools = {name: EnvironmentPool([actor]) for name, actor in actors.items()}  # type: ignore[list-item]
    return asyncio.run(weighted_pools(env, pools)["sum"].step(turns))


def right(one: Turn) -> Feedback:
    return Feedback({"correct": float(one.response == one.answer)}, turn_number=one.number)


def scored(one: Turn) -> Feedback:
    rewards = {"style": float(len(one.response)), "tone": -1.0}
    return Feedback(rewards, metrics={"has_verdict": 1.0}, turn_number=one.number)


def test_the_reward_is_the_weighted_sum_and_each_component_is_reported_under_its_environments_name() -> None:
    turns = [turn("ab", "ab"), turn("abcde", "x")]
    first, second = judged(
        turns, {"math": 2.0, "quality": 0.5}, math=Actor(right), quality=Actor(scored), unused=Actor(right)
    )
    assert first.rewards == {"math": 2.0, "quality": 0.5}  # 2 * 1, 0.5 * (2 - 1)
    assert second.rewards == {"math": 0.0, "quality": 2.0}  # 2 * 0, 0.5 * (5 - 1)
    assert (first.reward, second.reward) == (2.5, 2.0)
    assert second.metrics == {
        "math/reward/correct": 0.0,
        "quality/reward/style": 5.0,
        "quality/reward/tone": -1.0,
        "quality/has_verdict": 1.0,
    }


def test_each_component_is_asked_in_batches_of_its_own_size_and_answers_stay_in_order() -> None:
    math, quality = Actor(right), Actor(scored)
    turns = [turn("a" * length, "aaa") for length in range(5)]
    feedback = judged(turns, {"math": 1.0, "quality": 1.0}, batch_size=2, math=math, quality=quality)
    assert math.sizes == quality.sizes == [2, 2, 1]
    assert [one.rewards["quality"] for one in feedback] == [-1.0, 0.0, 1.0, 2.0, 3.0]
    assert [one.rewards["math"] for one in feedback] == [0.0, 0.0, 0.0, 1.0, 0.0]


def test_a_component_that_abstains_is_left_out_of_the_sum_and_of_the_metrics() -> None:
    def abstains(one: Turn) -> Feedback:
        return checked(Feedback({"correct": None}, metrics={"seen": 1.0}), turn_number=one.number)

    (one,) = judged(
        [turn("ab", "ab")], {"math": 2.0, "style": 0.5}, math=Actor(abstains), style=Actor(scored)
    )
    assert one.rewards == {"math": None, "style": 0.5}
    assert one.reward == 0.5
    assert [name for name in one.metrics if name.startswith("math")] == []
    (none,) = judged([turn("a", "a")], {"math": 2.0, "more": 1.0}, math=Actor(abstains), more=Actor(abstains))
    assert none.failure is not None
    assert none.failure.kind is FailureKind.abstained
    assert "(math, more)" in none.failure.reason


def test_a_part_of_a_component_may_abstain() -> None:
    def partly(one: Turn) -> Feedback:
        return Feedback({"style": None, "tone": 3.0}, turn_number=one.number)

    (one,) = judged([turn("ab", "ab")], {"quality": 0.5}, quality=Actor(partly))
    assert one.rewards == {"quality": 1.5}
    assert one.metrics == {"quality/reward/tone": 3.0}


def test_a_components_failure_is_the_samples_and_says_which_component() -> None:
    def fails(one: Turn) -> Feedback:
        return right(one) if one.response else Feedback.failed(FailureKind.unreachable, "no server")

    turns = [turn("", "a"), turn("a", "a")]
    failed, good = judged(turns, {"math": 1.0, "judge": 1.0}, math=Actor(right), judge=Actor(fails))
    assert failed.failure is not None
    assert failed.failure.kind is FailureKind.unreachable
    assert failed.failure.reason == "component judge: no server"
    assert (failed.rewards, failed.reward) == ({}, None)
    assert good.reward == 2.0


def test_a_component_that_answers_the_response_fails_the_sample() -> None:
    def answers(one: Turn) -> Feedback:
        return Feedback(observation="go on", is_done=False)

    (failed,) = judged([turn("a")], {"game": 1.0}, game=Actor(answers))
    assert failed.failure is not None
    assert failed.failure.reason.startswith("component game: it answers the response")


def test_a_sum_beyond_float32_fails_the_sample() -> None:
    (failed,) = judged([turn("a", "a")], {"math": 1e39}, math=Actor(right))
    assert failed.failure is not None
    assert failed.failure.kind is FailureKind.not_finite


@pytest.mark.parametrize(("given", "seen"), [((7, 7), 7), ((7, 8), 8), ((3, 7), 3)])
def test_an_answer_to_another_turn_keeps_its_number(given: tuple[int, int], seen: int) -> None:
    first, second = (
        Actor(lambda one, number=number: replace(right(one), turn_number=number))  # type: ignore[misc]
        for number in given
    )
    asked = turn("a", "a", number=7)
    (feedback,) = judged([asked], {"one": 1.0, "two": 1.0}, one=first, two=second)
    assert feedback.turn_number == seen
