"""The metrics of a step's rewards and of its critic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_like.algorithms.options import GRPOConfig
from nemo_like.algorithms.rewards import Outcome
from nemo_like.batch.meta import Chunk, KVBatchMeta
from nemo_like.configuration import load_config
from nemo_like.driver.collection import Collected
from nemo_like.driver.reports import CriticStep, critic_metrics, reward_metrics
from nemo_like.driver.stages import with_outcome, with_shaped_rewards, without_mismatch, without_truncated
from nemo_like.driver.tag_functions import without_refused
from nemo_like.observability.metrics import mean
from nemo_like.policy.groups.results import ScoredBatch, TrainUpdate

CONFIG = Path(__file__).resolve().parents[3] / "configs" / "grpo_arithmetic_cpu.yaml"
BATCH = KVBatchMeta("train-1", (Chunk("a", (4, 4)),), ((0, 0), (0, 1)), frozenset())


def critic(returns: list[float], values: list[float]) -> CriticStep:
    """A step whose tokens have these returns, and had these values before its updates."""
    left = [own - value for own, value in zip(returns, values, strict=True)]
    sums = {
        "returns": sum(returns),
        "square_returns": sum(own * own for own in returns),
        "errors": sum(left),
        "square_errors": sum(own * own for own in left),
    }
    fit = {name: mean(total, len(returns)) for name, total in sums.items()}
    update = TrainUpdate({"loss": mean(0.5)}, version=1, compute_s=1.0, operations=())
    return CriticStep(ScoredBatch(BATCH, fit), update)


@pytest.mark.parametrize(
    ("values", "explained"),
    [
        ([1.0, 2.0, 3.0, 6.0], 1.0),
        ([3.0, 3.0, 3.0, 3.0], 0.0),
        # As far off everywhere: nothing but a shift is left open.
        ([0.0, 1.0, 2.0, 5.0], 1.0),
        # Returns vary by 14 / 4, and what is left, 0 0 -1 1, by 2 / 4.
        ([1.0, 2.0, 4.0, 5.0], 1 - 2 / 14),
        # Worse than a constant: what is left is -5 -1 1 5.
        ([6.0, 3.0, 2.0, 1.0], 1 - 52 / 14),
    ],
)
def test_explained_variance_is_what_the_values_say_of_the_returns(
    values: list[float], explained: float
) -> None:
    found = critic_metrics(critic([1.0, 2.0, 3.0, 6.0], values))
    assert found == pytest.approx(
        {"train/value/loss": 0.5, "train/value/returns": 3.0, "train/value/explained_variance": explained}
    )


@pytest.mark.parametrize("equal", [0.0, 0.1, 1 / 3, -1e3])
def test_equal_returns_have_no_variance_to_explain(equal: float) -> None:
    found = critic_metrics(critic([equal] * 7, [equal - 0.2] * 7))
    assert found == pytest.approx({"train/value/loss": 0.5, "train/value/returns": equal})


def test_without_samples_that_train_there_is_no_fit_and_without_a_critic_nothing() -> None:
    step = critic([1.0], [1.0])
    unfitted = CriticStep(ScoredBatch(BATCH), step.update)
    assert critic_metrics(unfitted) == {"train/value/loss": 0.5}
    assert critic_metrics(None) == {}


def rolled_out(first_group: int = 0) -> KVBatchMeta:
    """Two groups of three: rewards 1, 0, 0 and 1, none, 1, of which each group's last response is cut off."""
    return KVBatchMeta(
        partition="train-1",
        chunks=(Chunk(f"{first_group}", (8,) * 6),),
        rows=tuple((0, row) for row in range(6)),
        columns=frozenset(),
        tags={
            "group_id": tuple(first_group + row // 3 for row in range(6)),
            "reward": (1.0, 0.0, 0.0, 1.0, 0.0, 1.0),
            "is_judged": (True, True, True, True, False, True),
            "num_response_tokens": (2, 3, 8, 2, 3, 8),
            "is_truncated": (False, False, True) * 2,
            "mult_prob_error": (1.0, 1.0, 1.0, 1.0, 1.0, 9.0),
        },
    )


def collected(batch: KVBatchMeta, *dropped: KVBatchMeta) -> Collected:
    return Collected(
        batch=batch,
        dropped=dropped,
        metrics={},
        num_rollouts=1,
        generation_s=1.0,
        reward_s=0.0,
        put_s=0.0,
        operations=(),
    )


MASKS: dict[str, Callable[[KVBatchMeta, GRPOConfig], KVBatchMeta]] = {
    "overlong_filtering": lambda batch, cfg: without_truncated(batch),
    "seq_logprob_error_threshold": lambda batch, cfg: without_mismatch(batch, 1.5),
    "sample_filters": lambda batch, cfg: without_refused(
        batch, replace(cfg, sample_filters=["different_rewards", "not_truncated"])
    ),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_metrics_of_rewards_are_over_all_judged_samples_whatever_was_masked_since(
    mask: Callable[[KVBatchMeta, GRPOConfig], KVBatchMeta],
) -> None:
    cfg = load_config(CONFIG, ["grpo.reward_scaling.enabled=true", "grpo.reward_scaling.target_max=10"]).grpo
    whole = with_shaped_rewards(rolled_out(), cfg)
    masked = mask(whole, cfg)
    assert sum(masked.tags["sample_mask"]) < sum(whole.tags["sample_mask"])
    uniform = with_outcome(with_shaped_rewards(rolled_out(2), cfg), Outcome.uniform_group)
    found = reward_metrics(collected(masked, uniform))
    assert found == reward_metrics(collected(whole, uniform))
    assert found["reward"] == pytest.approx(3 / 5)
    assert found["filtered_reward"] == pytest.approx(3 / 5)
    assert found["shaped_reward"] == pytest.approx(6)
    assert found["baseline_reward/pct_1"] == pytest.approx(40)
