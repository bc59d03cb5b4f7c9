"""A bad reward costs one sample. Environments here misbehave for the turns whose response says so."""

from __future__ import annotations

import asyncio
import math
import threading
import time

import pytest

from nemo_like.config.schema import EnvConfig, EnvironmentKind
from nemo_like.environments.interface import Feedback, Turn
from nemo_like.environments.server import EnvironmentServer

TIMEOUT_S = 1.0
LONG_S = 30.0


class Misbehaving:
    async def step(self, turns):
        return [await self._judge(turn.response) for turn in turns]

    async def _judge(self, response):
        if response == "raise":
            raise KeyError("no such answer")
        if response == "wait":
            await asyncio.sleep(LONG_S)
        if response == "block":
            threading.Event().wait(LONG_S)
        return Feedback(rewards={"score": {"nan": math.nan, "inf": math.inf}.get(response, 1.0)})


class Forgetful:
    """Answers only the first turn."""

    async def step(self, turns):
        return [Feedback(rewards={"score": 1.0})]


def turn(response):
    return Turn(prompt="", response=response, answer="", is_truncated=False)


def config():
    return EnvConfig(kind=EnvironmentKind.arithmetic, num_actors=1, timeout_s=TIMEOUT_S)


def ask(*responses, environment=Misbehaving):
    return asyncio.run(EnvironmentServer(config(), environment).step([turn(r) for r in responses]))


def test_the_environment_is_the_one_that_the_config_names():
    turns = [Turn(prompt="21+43=", response=r, answer="640", is_truncated=False) for r in ("640", "641")]
    feedback = asyncio.run(EnvironmentServer(config()).step(turns))
    assert [item.reward for item in feedback] == [1.0, 0.0]


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("raise", "the reward raised KeyError: 'no such answer'"),
        ("wait", "the reward took longer than env.timeout_s=1 s"),
        ("block", "the reward took longer than env.timeout_s=1 s"),
        ("nan", "the reward 'score' is nan"),
        ("inf", "the reward 'score' is inf"),
    ],
)
def test_a_bad_reward_fails_its_own_sample_and_no_other(response, reason):
    feedback = ask("good", response, "good")
    assert [item.reward for item in feedback] == [1.0, None, 1.0]
    assert feedback[1].failure == reason


def test_every_kind_of_failure_at_once_is_told_apart():
    feedback = ask("raise", "good", "block", "wait", "nan")
    assert [item.failure is None for item in feedback] == [False, True, False, False, False]


def test_many_hanging_rewards_cost_one_timeout_and_not_one_each():
    started_s = time.monotonic()
    feedback = ask(*["block"] * 20, "good")
    assert [item.reward for item in feedback] == [None] * 20 + [1.0]
    # One timeout for the batch and one for the turns on their own; 20 in a row would take 20 s.
    assert time.monotonic() - started_s < 10.0


def test_a_blocking_reward_does_not_hold_up_another_call():
    async def both():
        server = EnvironmentServer(config(), Misbehaving)
        slow = asyncio.create_task(server.step([turn("block")]))
        await asyncio.sleep(0)
        quick = await asyncio.wait_for(server.step([turn("good")]), timeout=LONG_S / 2)
        return await slow, quick

    slow, quick = asyncio.run(both())
    assert slow[0].reward is None
    assert quick[0].reward == 1.0


def test_the_server_works_on_after_a_blocking_reward():
    async def twice():
        server = EnvironmentServer(config(), Misbehaving)
        await server.step([turn("block")])
        started_s = time.monotonic()
        feedback = await server.step([turn("good")])
        return feedback, time.monotonic() - started_s

    feedback, elapsed_s = asyncio.run(twice())
    assert feedback[0].reward == 1.0
    assert elapsed_s < TIMEOUT_S


def test_a_wrong_number_of_answers_is_settled_turn_by_turn():
    assert [item.reward for item in ask("a", "b", "c", environment=Forgetful)] == [1.0, 1.0, 1.0]


def test_no_turns_give_no_feedback():
    assert ask() == []


def test_threads_of_failed_turns_end():
    before = set(threading.enumerate())
    ask(*["raise"] * 10)
    started = [thread for thread in threading.enumerate() if thread not in before]
    for thread in started:
        thread.join(0.5)
    # One stays: the server's own.
    assert sum(thread.is_alive() for thread in started) <= 1
