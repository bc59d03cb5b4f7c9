from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_like.algorithms.estimators import AdvantageInputs
from nemo_like.algorithms.options import GRPOConfig
from nemo_like.algorithms.sample_filters import RolledOut
from nemo_like.batch.meta import Chunk, KVBatchMeta
from nemo_like.batch.tags import ADVANTAGE, NUM_TURNS, OUTCOME, SAMPLE_MASK, reads_tags, reward_component
from nemo_like.configuration import load_config
from nemo_like.driver.run_failures import RunFailed
from nemo_like.driver.tag_functions import with_estimated_advantages, without_refused

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def cfg() -> GRPOConfig:
    return load_config(REPOSITORY / "configs" / "grpo_arithmetic_cpu.yaml").grpo


def batch() -> KVBatchMeta:
    return KVBatchMeta(
        partition="train-7",
        chunks=(Chunk("a", (8, 8, 8, 8)),),
        rows=tuple((0, row) for row in range(4)),
        columns=frozenset(),
        tags={
            "reward": (1.0, 0.0, 0.0, 1.0),
            "shaped_reward": (1.0, 0.0, 0.0, 1.0),
            "sample_mask": (1, 1, 0, 1),
            "outcome": ("trained", "trained", "reward_failed", "trained"),
            "group_id": (0, 0, 0, 0),
            "num_response_tokens": (2, 3, 4, 4),
            "is_truncated": (False, False, True, True),
            "num_turns": (1, 2, 1, 3),
        },
    )


@reads_tags(NUM_TURNS)
def brief(samples: RolledOut, cfg: GRPOConfig) -> list[bool]:
    return [turns < 3 for turns in samples.tags["num_turns"]]


@reads_tags(NUM_TURNS)
def per_turn(inputs: AdvantageInputs, cfg: GRPOConfig) -> list[float]:
    return [reward / turns for reward, turns in zip(inputs.rewards, inputs.tags["num_turns"], strict=True)]


@reads_tags(reward_component("format"))
def of_format(inputs: AdvantageInputs, cfg: GRPOConfig) -> list[float]:
    return list(inputs.tags["reward/format"])


def broken(inputs: AdvantageInputs, cfg: GRPOConfig) -> list[float]:
    return [inputs.tags["num_truns"]]


def estimator(cfg: GRPOConfig, function: Callable[..., object]) -> GRPOConfig:
    path = f"{__name__}:{function.__name__}"
    return replace(cfg, adv_estimator=replace(cfg.adv_estimator, name=path))


def test_filters_mask_in_order_and_leave_earlier_reasons(cfg: GRPOConfig) -> None:
    filtered = without_refused(batch(), replace(cfg, sample_filters=[f"{__name__}:brief", "not_truncated"]))
    assert filtered.tag(SAMPLE_MASK) == (1, 1, 0, 0)
    assert filtered.tag(OUTCOME) == ("trained", "trained", "reward_failed", "filtered")
    assert without_refused(batch(), cfg) == batch()


def test_an_estimator_gets_the_tags_that_it_declares(cfg: GRPOConfig) -> None:
    assert with_estimated_advantages(batch(), estimator(cfg, per_turn)).tag(ADVANTAGE) == (
        1.0,
        0.0,
        0.0,
        1 / 3,
    )


def test_what_fails_is_told_with_the_function_the_step_and_the_line(cfg: GRPOConfig) -> None:
    with pytest.raises(
        RunFailed, match=r"of_format failed at step 7: reads the tag 'reward/format', which no"
    ):
        with_estimated_advantages(batch(), estimator(cfg, of_format))
    with pytest.raises(
        RunFailed, match=r"broken failed at step 7: KeyError: 'num_truns' \(test_tag_functions"
    ):
        with_estimated_advantages(batch(), estimator(cfg, broken))


def endless(inputs: AdvantageInputs, cfg: GRPOConfig) -> list[float]:
    threading.Event().wait()
    return []


def endless_filter(samples: RolledOut, cfg: GRPOConfig) -> list[bool]:
    threading.Event().wait()
    return []


def test_what_never_returns_has_a_deadline(cfg: GRPOConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nemo_like.driver.tag_functions._DEADLINE_S", 0.01)
    told = "endless failed at step 7: did not return within 0.01 s"
    with pytest.raises(RunFailed, match=told):
        with_estimated_advantages(batch(), estimator(cfg, endless))
    name = f"{__name__}:endless_filter"
    with pytest.raises(RunFailed, match=f"grpo.sample_filters: {name} failed at step 7: did not return"):
        without_refused(batch(), replace(cfg, sample_filters=[name]))
