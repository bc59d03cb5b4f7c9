"""The order in which the engines and the trainer of a live run are asked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nemo_like.configuration import load_config
from nemo_like.mismatch import live
from nemo_like.mismatch.comparison import Compared
from nemo_like.mismatch.search import NOTHING, EngineMismatch, WeightComparison
from nemo_like.mismatch.sides import ARRIVED_WEIGHTS, HELD_WEIGHTS, WEIGHT_WORDS
from nemo_like.mismatch.weight_words import WeightWords
from tests.unit.documented import ROOT

NORM, HEAD = "model.norm.weight", "lm_head.weight"


class Sides:
    """An engine with weights of version 4, and a trainer at version 5."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self.calls = name, calls

    def ask_engine(self, method: str, *args: Any) -> dict[str, int]:
        self.calls.append(f"{self.name}: {args[0].rpartition(':')[2]}")
        return {HELD_WEIGHTS: {NORM: 41}, ARRIVED_WEIGHTS: {NORM: 7, HEAD: 42}}[args[0]]

    def ask_trainer(self, method: str, *args: Any) -> list[WeightWords]:
        assert args == (WEIGHT_WORDS,)
        self.calls.append("trainer: weight_words")
        return [WeightWords({NORM: 51}, {NORM: 8}), WeightWords({HEAD: 52}, {HEAD: 53})]


@pytest.fixture
def calls() -> list[str]:
    return []


def searched(monkeypatch: pytest.MonkeyPatch, calls: list[str], differing: dict[str, int | None]) -> str:
    """What is said where the second of two engines has these weights other than the trainer."""

    def find_mismatch(cfg: Any, sides: Sides, prompt: Any, sampling: Any, history: Any) -> EngineMismatch:
        calls.append(f"{sides.name}: find_mismatch")
        assert history.words == {
            4: WeightWords({NORM: 41}, {HEAD: 42}),
            5: WeightWords({NORM: 51, HEAD: 52}, {NORM: 8, HEAD: 53}),
        }
        weights = WeightComparison(
            differing=differing if sides.name == "second" else {},
            compared=frozenset({NORM, HEAD}),
            version=5,
            is_earlier_version=False,
        )
        return EngineMismatch(compared=Compared({}, ()), weights=weights, settings=None, num_tokens=9)

    monkeypatch.setattr(live, "find_mismatch", find_mismatch)
    monkeypatch.setattr(live, "random_prompts", lambda cfg: [[1], [2, 3]])
    cfg = load_config(Path(ROOT / "configs/grpo_arithmetic_cpu.yaml"))
    sides = [Sides("first", calls), Sides("second", calls)]
    return live.live_mismatch(cfg, sides, 4, 5, lambda version: calls.append(f"send {version}"))


def test_what_engines_have_is_read_before_they_get_the_weights_again(
    monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    said = searched(monkeypatch, calls, {NORM: 4})
    assert said == ("engine 1: norm: the engine has the weight that it had at version 4, the trainer is at 5")
    assert calls == [
        "first: held",
        "first: arrived",
        "second: held",
        "second: arrived",
        "trainer: weight_words",
        "send 5",
        "first: find_mismatch",
        "send 5",
        "second: find_mismatch",
    ]


def test_engines_that_agree_are_told_as_such(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    said = searched(monkeypatch, calls, {})
    assert said == f"{NOTHING} on random tokens, now that the engines have got the weights once more"
