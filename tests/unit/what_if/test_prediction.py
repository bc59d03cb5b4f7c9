"""Predictions for a configuration, from a run that was written by hand."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from nemo_like.algorithms.options import WeightUpdates
from nemo_like.configuration import Config
from nemo_like_tools.what_if.calibration import UnfitRun
from nemo_like_tools.what_if.prediction import format_what_if, modes, splits, what_if
from nemo_like_tools.what_if.workload import GroupWork, Mode, SampleWork, Split, StepWork, TurnWork
from tests.unit.what_if.test_calibration import write_run

Demo = Callable[..., Config]
SMALL = (
    "grpo.num_prompts_per_step=2",
    "grpo.num_generations_per_prompt=2",
    "grpo.val_period=0",
    "policy.train_global_batch_size=2",
    "policy.data_parallel_size=2",
    "generation.num_engines=1",
)


def work(*lengths: int) -> StepWork:
    samples = tuple(SampleWork(length, (TurnWork(length, 0.0),)) for length in lengths)
    return StepWork(
        rollouts=((GroupWork(samples, False),),),
        begin_s=0.0,
        put_s=0.0,
        scoring_s=0.0,
        training_s=1.0,
        calls_s=0.0,
        driver_s=0.0,
    )


def test_a_synchronous_run_is_simulated_as_it_was_measured(demo: Demo, tmp_path: Path) -> None:
    found = what_if(demo(*SMALL), write_run(tmp_path / "run"))
    assert found.run.measured_step_s == 10.0
    assert found.as_recorded.result.step_s == pytest.approx(10.0)
    assert found.predictions[0].mode == Mode()
    assert found.predictions[0].split == Split(1, 2)


def test_the_table_and_the_json_have_every_mode_and_the_best(demo: Demo, tmp_path: Path) -> None:
    found = what_if(demo(*SMALL), write_run(tmp_path / "run"))
    text, whole = format_what_if(found), json.loads(json.dumps(found.as_json()))
    for mode in (
        "synchronous",
        "exact overlap",
        "max_staleness=2 in_flight",
        "max_staleness=4 between_samples",
    ):
        assert f"\n{mode} " in text
    assert "other splits of as many devices" in text
    assert f"shortest step: {found.best.mode.name} with" in text
    assert whole["best"]["step_s"] == min(one["step_s"] for one in whole["predictions"])
    assert {one["split"]["num_engines"] for one in whole["predictions"]} == {1, 2}
    assert whole["calibration"]["measured_step_s"] == 10.0
    assert len(whole["assumptions"]) == 7


def test_splits_use_as_many_devices_and_divide_the_batch(demo: Demo) -> None:
    cfg = demo(*SMALL, "generation.num_engines=4", "policy.train_global_batch_size=4")
    assert splits(cfg) == [Split(4, 2), Split(5, 1), Split(2, 4)]


def test_an_engine_of_several_devices_trades_for_as_many_replicas(demo: Demo) -> None:
    cfg = demo(*SMALL, "generation.num_engines=2", "generation.vllm_cfg.tensor_parallel_size=2")
    assert splits(cfg) == [Split(2, 2)]
    cfg = demo(*SMALL, "generation.num_engines=2", "policy.megatron_cfg.tensor_model_parallel_size=2")
    assert splits(cfg) == [Split(2, 2), Split(4, 1)]


def test_the_configured_staleness_is_among_the_modes(demo: Demo) -> None:
    cfg = demo(*SMALL)
    cfg.grpo.max_staleness = 3
    assert Mode(max_staleness=3, weight_updates=WeightUpdates.in_flight) in modes(cfg)
    limited = modes(replace(cfg, rollout=replace(cfg.rollout, max_tokens_per_step=2)))
    assert set(modes(cfg)) < set(limited)
    assert Mode(max_staleness=3, max_tokens_per_step=2) in limited


def test_another_number_of_samples_is_refused(demo: Demo, tmp_path: Path) -> None:
    cfg = demo(*SMALL, "grpo.num_prompts_per_step=4")
    with pytest.raises(UnfitRun, match="its steps have 2 prompts of 2 samples, and"):
        what_if(cfg, write_run(tmp_path / "run"))


def test_engines_that_share_the_trainers_devices_cannot_overlap(demo: Demo, tmp_path: Path) -> None:
    cfg = demo(*SMALL, "cluster.placement=colocated")
    with pytest.raises(UnfitRun, match=r"set cluster\.placement=separate"):
        what_if(cfg, write_run(tmp_path / "run"))
