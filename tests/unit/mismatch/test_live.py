"""The order in which the engines and the trainer of a live run are asked."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_like.configuration import load_config
from nemo_like.mismatch import live
from nemo_like.mismatch.comparison import Compared
from nemo_like.mismatch.search import NOTHING, EngineMismatch, WeightComparison
from nemo_like.mismatch.sides import ARRIVED_WEIGHTS, HELD_WEIGHTS, SAMPLE, WEIGHT_WORDS
from nemo_like.mismatch.weight_words import WeightWords
from tests.unit.documented import ROOT

NORM, HEAD = "model.norm.weight", "lm_head.weight"


class Sides:
    """An engine with weights of version 4, and a trainer at version 5."""

    def __init__(self, name: str, calls: list[str], cached: float, beside: float) -> None:
        """An answer by what is cached has the log-prob ``cached``; without a cache it is -2. The trainer
        gives a sample the log-prob -3, and the second of two samples ``beside``."""
        self.name, self.calls, self.cached, self.beside = name, calls, cached, beside

    def ask_engine(self, method: str, *args: Any) -> Any:
        if method == "canary_logprobs":
            assert args == ([2, 3, 9],)
            return [-1.0, -2.0]
        if args[0] == SAMPLE:
            prompt, sampling, seed, reads_cache = (*args[1:], False)[:4]
            assert (sampling.temperature, sampling.max_new_tokens, seed) == (1.0, 4, 0)
            self.calls.append(f"{self.name}: sample {prompt}" + ", cached" * reads_cache)
            return SimpleNamespace(token_ids=[9], logprobs=[self.cached if reads_cache else -2.0])
        self.calls.append(f"{self.name}: {args[0].rpartition(':')[2]}")
        return {HELD_WEIGHTS: {NORM: 41}, ARRIVED_WEIGHTS: {NORM: 7, HEAD: 42}}[args[0]]

    def ask_trainer(self, method: str, *args: Any) -> list[Any]:
        if method != "look":
            answers = {"sample_logprobs": [-3.0], "samples_logprobs": [[-3.0], [self.beside]]}
            assert args == {"sample_logprobs": ([2, 3],), "samples_logprobs": ([[2, 3]] * 2,)}[method]
            self.calls.append(f"trainer: {method}")
            return [answers[method]] * 2
        assert args == (WEIGHT_WORDS,)
        self.calls.append("trainer: weight_words")
        return [WeightWords({NORM: 51}, {NORM: 8}), WeightWords({HEAD: 52}, {HEAD: 53})]


@pytest.fixture
def calls() -> list[str]:
    return []


def searched(
    monkeypatch: pytest.MonkeyPatch,
    calls: list[str],
    differing: dict[str, int | None],
    cached: float = -2.0,
    beside: float = -3.0,
) -> str:
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
    sides = [Sides("first", calls, -2.0, beside), Sides("second", calls, cached, beside)]
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
        "first: sample [2, 3]",
        "second: sample [2, 3]",
        "send 5",
        "first: sample [2, 3], cached",
        "first: find_mismatch",
        "send 5",
        "second: sample [2, 3], cached",
        "second: find_mismatch",
    ]


def test_engines_that_agree_are_told_as_such(monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    said = searched(monkeypatch, calls, {})
    assert said == f"{NOTHING} on random tokens, now that the engines have got the weights once more"


def test_what_a_cache_keeps_of_earlier_weights_is_told_where_all_modules_agree(
    monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    said = searched(monkeypatch, calls, {}, cached=-2.001)
    assert said == (
        "engine 1: prefix cache: under new weights it still has keys and values of earlier ones; "
        f"{NOTHING} in modules"
    )
    assert searched(monkeypatch, calls, {NORM: 4}, cached=-2.001).startswith("engine 1: norm: ")
    assert searched(monkeypatch, calls, {}, cached=-2.00001).startswith(f"{NOTHING} on random tokens")


def test_log_probs_that_another_sample_changes_are_told_where_all_else_agrees(
    monkeypatch: pytest.MonkeyPatch, calls: list[str]
) -> None:
    said = searched(monkeypatch, calls, {}, beside=-3.001)
    assert said == (
        "micro-batches: the trainer gives a sample other log-probs beside another sample than alone; "
        f"{NOTHING} for a sample alone"
    )
    assert calls[-2:] == ["trainer: sample_logprobs", "trainer: samples_logprobs"]
    assert searched(monkeypatch, calls, {NORM: 4}, beside=-3.001).startswith("engine 1: norm: ")
    assert searched(monkeypatch, calls, {}, beside=-3.00001).startswith(f"{NOTHING} on random tokens")
