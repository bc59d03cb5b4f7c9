from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nemo_like.algorithms.options import GRPOConfig
from nemo_like.batch.meta import Chunk, KVBatchMeta
from nemo_like.configuration import load_config
from nemo_like.data.interface import SourceReport
from nemo_like.driver.run_failures import RunFailed
from nemo_like.driver.validation import ValidationSet, reached_goal, validation_report, validation_sets
from nemo_like.rollout.prompts import RolloutResult

REPOSITORY = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def cfg() -> GRPOConfig:
    return load_config(REPOSITORY / "configs" / "grpo_arithmetic_cpu.yaml").grpo


def answered(rewards: list[float | None], size: int = 1) -> RolloutResult:
    """One sample per reward, in groups of ``size``; None is a failed reward. All answers differ."""
    count = len(rewards)
    batch = KVBatchMeta(
        partition="validation-1",
        chunks=(Chunk("a", (5,) * count),),
        rows=tuple((0, row) for row in range(count)),
        columns=frozenset(),
        tags={
            "group_id": tuple(i // size for i in range(count)),
            "reward": tuple(reward or 0.0 for reward in rewards),
            "is_judged": tuple(reward is not None for reward in rewards),
            "answer_id": tuple(i % size for i in range(count)),
            "num_response_tokens": tuple(range(1, count + 1)),
            "is_truncated": (False,) * (count - 1) + (True,),
        },
    )
    return RolloutResult(batch, {}, generation_s=0.0, reward_s=0.0, put_s=0.0, operations=())


def source(name: str, num_prompts: int) -> SourceReport:
    return SourceReport(name=name, num_prompts=num_prompts, num_too_long=0, digest="")


def test_every_source_gives_its_first_problems_by_their_index_in_all_of_them() -> None:
    assert validation_sets([source("easy", 10), source("hard", 2)], max_samples=3) == (
        ValidationSet("easy", (0, 1, 2)),
        ValidationSet("hard", (10, 11)),
    )


def test_one_set_has_the_plain_names(cfg: GRPOConfig) -> None:
    report = validation_report(answered([1.0, 0.0]), [ValidationSet("all", (0, 1))], cfg, {"timing/x": 2.0})
    assert report.metrics == {
        "validation/accuracy": 0.5,
        "validation/reward": 0.5,
        "validation/avg_length": 1.5,
        "validation/truncation_rate": 0.5,
        "validation/num_samples": 2.0,
        "validation/num_failed_rewards": 0.0,
        "validation/failed_reward_share": 0.0,
        "timing/x": 2.0,
    }


def test_several_sets_are_reported_together_and_apart(cfg: GRPOConfig) -> None:
    sets = [ValidationSet("easy", (0, 1)), ValidationSet("hard", (9,))]
    metrics = validation_report(answered([1.0, 1.0, 0.0]), sets, cfg, {}).metrics
    assert metrics["validation/accuracy"] == pytest.approx(2 / 3)
    assert (metrics["validation/easy/accuracy"], metrics["validation/hard/accuracy"]) == (1.0, 0.0)
    assert (metrics["validation/easy/num_samples"], metrics["validation/hard/num_samples"]) == (2.0, 1.0)
    assert metrics["validation/hard/truncation_rate"] == 1.0


def test_several_answers_belong_to_the_set_of_their_problem(cfg: GRPOConfig) -> None:
    sets = [ValidationSet("easy", (0,)), ValidationSet("hard", (5,))]
    pairs = replace(cfg, num_val_generations_per_prompt=2)
    metrics = validation_report(answered([1.0, 0.0, 0.0, 0.0], size=2), sets, pairs, {}).metrics
    assert metrics["validation/easy/pass@2"] == 1.0
    assert metrics["validation/hard/pass@2"] == 0.0
    assert metrics["validation/pass@1"] == 0.25


def test_failed_rewards_count_nowhere(cfg: GRPOConfig) -> None:
    report = validation_report(answered([1.0, None, None]), [ValidationSet("all", (0, 1, 2))], cfg, {})
    assert report.metrics["validation/accuracy"] == 1.0
    assert report.metrics["validation/num_failed_rewards"] == 2.0
    assert report.metrics["validation/failed_reward_share"] == pytest.approx(2 / 3)


def test_a_set_that_nobody_could_judge_has_no_accuracy_and_reaches_no_goal(cfg: GRPOConfig) -> None:
    sets = [ValidationSet("easy", (0, 1)), ValidationSet("hard", (9,))]
    metrics = validation_report(answered([1.0, 0.0, None]), sets, cfg, {}).metrics
    assert metrics["validation/accuracy"] == 0.5
    assert "validation/hard/accuracy" not in metrics
    assert metrics["validation/hard/failed_reward_share"] == 1.0
    goal = replace(cfg, val_stop_threshold=0.0, val_stop_metric="validation/hard/accuracy")
    assert not reached_goal(metrics, goal)


def test_the_goal_is_reached_at_the_threshold(cfg: GRPOConfig) -> None:
    report = validation_report(answered([1.0, 0.0]), [ValidationSet("all", (0, 1))], cfg, {})
    assert not reached_goal(report.metrics, cfg)
    assert reached_goal(report.metrics, replace(cfg, val_stop_threshold=0.5))
    assert not reached_goal(report.metrics, replace(cfg, val_stop_threshold=0.51))
    assert not reached_goal({"train/reward": 1.0}, replace(cfg, val_stop_threshold=0.5))


def test_a_goal_that_no_validation_has_ends_the_run_with_the_metrics_there_are(cfg: GRPOConfig) -> None:
    report = validation_report(answered([1.0]), [ValidationSet("all", (0,))], cfg, {})
    goal = replace(cfg, val_stop_threshold=0.5, val_stop_metric="validation/easy/accuracy")
    with pytest.raises(
        RunFailed, match=r"easy/accuracy is no metric of the validation; there are validation/acc"
    ):
        reached_goal(report.metrics, goal)
