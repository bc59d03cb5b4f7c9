"""Rewards with verl's signature, as the kind ``function`` calls them."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_like.environments.interface import Exchange, FailureKind
from tests.unit.environments.asking import ask, judge, turn

# As verl's documentation has such files, with nothing of this framework.
MODULE = """
import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
    if data_source != "openai/gsm8k":
        raise NotImplementedError(data_source)
    found = re.search("#### ([0-9]+)", solution_str)
    right = found is not None and found.group(1) == ground_truth
    return right + bonus * extra_info["level"]


async def named(data_source, solution_str, ground_truth, extra_info, **kwargs):
    return {"score": 0.25 * len(ground_truth["target"]), "acc": True, "pred": solution_str}


def batched(data_sources, solution_strs, ground_truths, extra_infos):
    return [float(said == truth) for said, truth in zip(solution_strs, ground_truths)]


def whole(data_source, solution_str, ground_truth, extra_info):
    return {"score": float(solution_str == "a[b]c"), "turns": extra_info["num_turns"]}


def nameless(data_source, solution_str, ground_truth, extra_info):
    return {"acc": 1.0}
"""
DATA = {"data_source": "openai/gsm8k", "extra_info": {"level": 2}}


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "of_verl.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("of_verl", None)


def options(name: str, **arguments: Any) -> dict[str, Any]:
    return {"function": f"of_verl:{name}", "arguments": arguments}


def test_a_score_is_the_reward_and_arguments_are_given_beside_it() -> None:
    of_one = options("compute_score", bonus=0.25)
    assert judge("function", "#### 42", "42", data=DATA, **of_one).rewards == {"reward": 1.5}
    assert judge("function", "#### 41", "42", data=DATA, **of_one).rewards == {"reward": 0.5}


def test_of_named_values_the_score_is_the_reward_and_numbers_are_metrics() -> None:
    data = {**DATA, "reward_model": {"style": "rule", "ground_truth": {"target": [1, 2, 3]}}}
    feedback = judge("function", "x", "the answer's text", data=data, **options("named"))
    assert feedback.rewards == {"reward": 0.75} and feedback.metrics == {"acc": 1.0}


def test_a_function_of_lists_gets_all_turns_at_once() -> None:
    turns = [turn("1", "1", data=DATA), turn("1", "2", data=DATA)]
    assert [each.reward for each in ask("function", *turns, **options("batched"))] == [1.0, 0.0]


def test_the_solution_is_the_whole_conversation_after_the_prompt() -> None:
    feedback, *_ = ask("function", turn("c", data=DATA, history=(Exchange("a", "[b]"),)), **options("whole"))
    assert feedback.rewards == {"reward": 1.0} and feedback.metrics == {"turns": 4.0}


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("compute_score", {}, "the record has no field data_source"),
        ("compute_score", {"data_source": "other"}, "NotImplementedError: other"),
        ("nameless", DATA, "'acc' without 'score'"),
    ],
)
def test_what_raises_fails_its_sample_with_the_reason(name: str, data: dict[str, Any], reason: str) -> None:
    failure = judge("function", "x", data=data, **options(name)).failure
    assert failure is not None and failure.kind is FailureKind.raised and reason in failure.reason


def test_a_list_of_another_length_is_an_error() -> None:
    from nemo_like.environments.verl_reward import VerlReward

    def short(data_sources: Any, solution_strs: Any, ground_truths: Any, extra_infos: Any) -> list[float]:
        return [1.0]

    with pytest.raises(ValueError, match="gave 1 scores for 2 responses"):
        asyncio.run(VerlReward(short, {}).step([turn("1", data=DATA)] * 2))
