"""Reward functions that travel by value, and what they are called with."""

from __future__ import annotations

import asyncio
import inspect
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_like.batch.columns import Column, Layout, declared_by, writes
from nemo_like.data.interface import Message
from nemo_like.data.messages import conversation_of
from nemo_like.environments.interface import FailureKind, Feedback, Turn
from nemo_like.environments.own_reward import (
    Reward,
    RewardParameters,
    UnfitReward,
    WeightedRewards,
    pickled_reward,
    saved_reward,
)
from tests.unit.config.checkpoints import REPOSITORY
from tests.unit.environments.asking import turn

CHAT = (Message("system", "Be brief."), Message("user", "1+1?"))
Asked = Callable[..., Sequence[Feedback]]


@pytest.fixture
def asked(tmp_path: Path) -> Asked:
    """``asked(reward, turn, ...)``: what the function says of the turns once it was written to a file."""

    def ask(reward: Reward, *turns: Turn) -> Sequence[Feedback]:
        path = tmp_path / "reward.pickle"
        path.write_bytes(pickled_reward(reward))
        return asyncio.run(saved_reward(str(path)).step(turns))

    return ask


def test_a_function_is_called_with_what_its_parameters_name(asked: Asked) -> None:
    def reward(response: str, answer: str, level: int, prompt: str) -> float:
        return 10.0 * level + (response == answer) + (prompt == "2+2=")

    (one,) = asked(reward, turn("4", "4", prompt="2+2=", data={"level": 3, "unused": None}))
    assert one.rewards == {"reward": 32.0}


def test_a_function_that_takes_the_turn_gets_all_of_it(asked: Asked) -> None:
    (one,) = asked(lambda turn: len(turn.history) + turn.is_last, turn("4"))
    assert one.rewards == {"reward": 1.0}


def test_a_function_may_abstain_alone_and_in_a_list_as_those_of_trl_do(asked: Asked) -> None:
    def alone(response: str) -> float | None:
        return None if response == "?" else 1.0

    def in_lists(completions: list[str], **rest: Any) -> list[float | None]:
        return [alone(one) for one in completions]

    for reward in (alone, in_lists):
        judged, abstained = asked(reward, turn("4"), turn("?"))
        assert judged.rewards == {"reward": 1.0}
        assert abstained.rewards == {"reward": None}


def test_keywords_without_names_get_the_rest_of_the_row_and_defaults_stay(asked: Asked) -> None:
    def reward(weight: float = 0.5, **rest: Any) -> float:
        return weight * (rest["level"] + len(rest["response"]))

    (one,) = asked(reward, turn("ab", data={"level": 3}))
    assert one.rewards == {"reward": 2.5}


def test_a_prompt_of_messages_comes_as_a_row_has_it(asked: Asked) -> None:
    (one,) = asked(
        lambda prompt: float(prompt[1] == {"role": "user", "content": "1+1?"}), turn("", prompt=CHAT)
    )
    assert one.rewards == {"reward": 1.0}


def test_messages_come_with_all_of_their_fields(asked: Asked) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
    record = [
        {"role": "user", "content": "1+1?", "name": "ann"},
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "?"},
        {"role": "tool", "content": "2", "tool_call_id": "1"},
    ]
    said = turn("2", prompt=conversation_of(record))
    (one,) = asked(lambda prompt: float(prompt == record), said)
    (listed,) = asked(lambda prompts, completions: [float(prompts == [record])], said)
    (whole,) = asked(lambda turn: float(turn.prompt[1].extra["tool_calls"] == [call]), said)
    assert [each.rewards["reward"] for each in (one, listed, whole)] == [1.0, 1.0, 1.0]


def test_a_completion_has_the_beginning_that_the_prompt_gave_it_as_in_trl(asked: Asked) -> None:
    said = turn(" 2", prompt=(*CHAT, Message("assistant", "It is")))

    def reward(prompts: list[Any], completions: list[Any]) -> list[float]:
        is_split = completions == [[{"role": "assistant", "content": "It is 2"}]]
        return [float(is_split and prompts[0] == [one.as_mapping() for one in CHAT])]

    (listed,) = asked(reward, said)
    (one,) = asked(
        lambda prompt, response: float(prompt[-1]["content"] == "It is" and response == " 2"), said
    )
    assert (listed.rewards, one.rewards) == ({"reward": 1.0}, {"reward": 1.0})


def test_named_numbers_and_feedback_are_rewards_too(asked: Asked) -> None:
    (named,) = asked(lambda response: {"right": np.float32(1), "short": 0.5}, turn("4"))
    assert named.rewards == {"right": 1.0, "short": 0.5}
    (whole,) = asked(lambda response: Feedback({"right": 1.0}, metrics={"length": len(response)}), turn("4"))
    assert whole.metrics == {"length": 1}


def test_calls_of_an_async_function_interleave(asked: Asked) -> None:
    arrived: list[str] = []

    async def reward(response: str) -> float:
        arrived.append(response)
        await asyncio.sleep(0)
        return len(arrived)

    assert [one.rewards["reward"] for one in asked(reward, turn("a"), turn("b"))] == [2.0, 2.0]


def test_a_function_of_trl_gets_lists_and_gives_a_list(asked: Asked) -> None:
    def of_trl(prompts: list[str], completions: list[str], level: list[int], **rest: Any) -> list[float]:
        assert rest == {"answer": ["4", "5"], "other": [None, 7]}
        return [float(p + c == "2+2=4") + n for p, c, n in zip(prompts, completions, level, strict=True)]

    turns = (
        turn("4", "4", prompt="2+2=", data={"level": 1}),
        turn("4", "5", prompt="2+3=", data={"level": 2, "other": 7}),
    )
    assert [one.rewards for one in asked(of_trl, *turns)] == [{"reward": 2.0}, {"reward": 2.0}]


def test_a_completion_after_messages_is_a_message_as_in_trl(asked: Asked) -> None:
    (one,) = asked(
        lambda completions: np.array([len(c[0]["content"]) for c in completions]), turn("abc", prompt=CHAT)
    )
    assert one.rewards == {"reward": 3.0}


def test_a_function_that_raises_fails_its_turn_and_names_the_line(asked: Asked) -> None:
    def reward(response: str) -> float:
        return 1 / int(response)

    good, bad = asked(reward, turn("2"), turn("0"))
    assert good.rewards == {"reward": 0.5}
    line = inspect.getsourcelines(reward)[1] + 1
    assert bad.failure is not None
    assert bad.failure.kind is FailureKind.raised
    assert (
        bad.failure.reason
        == f"the reward raised ZeroDivisionError: division by zero (line {line}, in reward)"
    )


def test_a_row_without_what_the_function_takes_fails_its_turn(asked: Asked) -> None:
    (one,) = asked(lambda level: 1.0, turn("4", data={"size": 3}))
    assert one.failure is not None
    assert "takes 'level', and there are 'size', 'turn', 'prompt'" in one.failure.reason


@pytest.mark.parametrize(
    ("reward", "told"),
    [
        ("exact", "is str and cannot be called"),
        (lambda response, /: 1.0, "takes response by position"),
        (type("NoSignature", (), {"__call__": max, "__signature__": 1})(), "does not say what it takes"),
    ],
)
def test_what_cannot_be_called_by_names_is_refused(reward: Any, told: str) -> None:
    with pytest.raises(UnfitReward, match=told):
        RewardParameters.of(reward)


def test_a_function_that_holds_what_cannot_be_sent_is_refused() -> None:
    lock = threading.Lock()
    with pytest.raises(UnfitReward, match=r"cannot be sent to other processes: TypeError: .*lock"):
        pickled_reward(lambda response: float(lock.locked()))


def test_columns_that_a_function_declares_are_those_of_its_environment(tmp_path: Path) -> None:
    column = Column("difficulty", "float32", Layout.per_sample, "how hard it was")

    @writes(column)
    def reward(response: str) -> Feedback:
        return Feedback({"reward": 1.0}, columns={"difficulty": 0.5})

    path = tmp_path / "reward.pickle"
    path.write_bytes(pickled_reward(reward))
    assert declared_by("env.reward", saved_reward, {"path": str(path)}).writes == (column,)
    assert declared_by("env.reward", saved_reward(str(path))).writes == (column,)


def correct(response: str, answer: str) -> float:
    return float(response == answer)


async def lengths(completions: list[str]) -> list[float | None]:
    return [len(one) or None for one in completions]


def test_several_functions_are_components_of_one_reward_with_their_weights(asked: Asked) -> None:
    functions = {"correct": correct, "lengths": lengths, "<lambda>": lambda level: {"a": level, "b": 1.0}}
    rewards = WeightedRewards(functions, {"correct": 2.0, "lengths": 0.5, "<lambda>": -1.0})
    first, second = asked(rewards, turn("46", "46", data={"level": 3}), turn("", "46", data={"level": 0}))
    assert first.rewards == {"correct": 2.0, "lengths": 1.0, "<lambda>": -4.0}
    assert first.reward == -1.0
    assert first.metrics == {
        **{"correct/reward/reward": 1.0, "lengths/reward/reward": 2.0},
        **{"<lambda>/reward/a": 3.0, "<lambda>/reward/b": 1.0},
    }
    assert second.rewards == {"correct": 0.0, "lengths": None, "<lambda>": -1.0}


def test_one_of_several_functions_that_raises_or_is_not_finite_fails_its_turn_and_is_named(
    asked: Asked,
) -> None:
    def inverse(response: str) -> float:
        return float("nan") if response == "nan" else 1 / int(response)

    rewards = WeightedRewards({"correct": correct, "inverse": inverse}, {"correct": 1.0, "inverse": 1.0})
    good, raised, infinite = asked(rewards, turn("2", "2"), turn("0"), turn("nan"))
    assert good.rewards == {"correct": 1.0, "inverse": 0.5}
    assert raised.failure is not None and infinite.failure is not None
    assert raised.failure.reason.startswith("component inverse: the reward raised ZeroDivisionError")
    assert infinite.failure.reason == "component inverse: the reward 'reward' is nan"


def test_a_list_of_another_length_names_its_function(asked: Asked) -> None:
    rewards = WeightedRewards({"few": lambda completions: [1.0]}, {"few": 1.0})
    with pytest.raises(ValueError, match="few gave 1 rewards for 2 responses"):
        asked(rewards, turn("a"), turn("b"))


def test_several_functions_have_the_columns_of_each(tmp_path: Path) -> None:
    column = Column("difficulty", "float32", Layout.per_sample, "how hard it was")

    @writes(column)
    def hard(response: str) -> Feedback:
        return Feedback({"reward": 1.0}, columns={"difficulty": 0.5})

    path = tmp_path / "reward.pickle"
    path.write_bytes(pickled_reward(WeightedRewards({"c": correct, "hard": hard}, {"c": 1.0, "hard": 3.0})))
    assert declared_by("env.reward", saved_reward, {"path": str(path)}).writes == (column,)
    environment = saved_reward(str(path))
    assert declared_by("env.reward", environment).writes == (column,)
    (one,) = asyncio.run(environment.step([turn("4", "4")]))
    assert (one.rewards, one.columns) == ({"c": 1.0, "hard": 3.0}, {"difficulty": 0.5})


PROGRAM = """
import sys
sys.path.append(sys.argv[1])
from helper_of_rewards import longest
from nemo_like.environments.own_reward import WeightedRewards, pickled_reward

LIMIT = 3

def reward(response):
    return float(longest(response) <= LIMIT)

functions = {"reward": reward, "limit": lambda response: LIMIT}
several = WeightedRewards(functions, {"reward": 1.0, "limit": 2.0})
sys.stdout.buffer.write(pickled_reward(several if sys.argv[2:] else reward))
"""


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ([], [{"reward": 1.0}, {"reward": 0.0}]),
        (["several"], [{"reward": 1.0, "limit": 6.0}, {"reward": 0.0, "limit": 6.0}]),
    ],
)
def test_a_function_of_a_program_comes_with_its_globals_and_finds_its_modules(
    more: list[str], expected: list[dict[str, float]], tmp_path: Path
) -> None:
    """Neither can be imported here by its name."""
    (tmp_path / "helper_of_rewards.py").write_text("def longest(text): return max(map(len, text.split()))")
    told = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), *more],
        cwd=REPOSITORY,
        check=True,
        capture_output=True,
    )
    path = tmp_path / "reward.pickle"
    path.write_bytes(told.stdout)
    folders, _ = pickle.loads(told.stdout)
    assert str(tmp_path) in folders
    kept = [*sys.path]
    try:
        answers = asyncio.run(saved_reward(str(path)).step([turn("one two"), turn("three")]))
    finally:
        sys.path[:] = kept
    assert [one.rewards for one in answers] == expected
