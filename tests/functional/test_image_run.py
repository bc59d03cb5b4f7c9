"""Whole runs of a model that reads images: sampled, trained, recorded, replayed; no pixel at the driver."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from scripts.demo_model.shapes import SIDE, write_records
from tests.functional.image_models import make_checkpoint
from tests.functional.runs import ROOT, SCORED, FinishedRun, run_grpo

pytestmark = [pytest.mark.whole_run, pytest.mark.timeout(300)]

CONFIG = "configs/grpo_shapes_vlm_cpu.yaml"
NUM_STEPS, NUM_PROMPTS, NUM_GENERATIONS = 3, 8, 4
# 16 patches of 14 x 14 pixels in three colours, twice in time, float32.
PICTURE_BYTES = 16 * 14 * 14 * 3 * 2 * 4
SMALL = [
    SCORED,
    f"grpo.max_num_steps={NUM_STEPS}",
    f"grpo.num_prompts_per_step={NUM_PROMPTS}",
    f"grpo.num_generations_per_prompt={NUM_GENERATIONS}",
    "grpo.skip_idle_samples=false",
    "grpo.val_at_start=false",
    "grpo.val_period=0",
    "grpo.val_at_end=false",
    "policy.train_global_batch_size=16",
    "policy.scheduler.warmup_updates=0",
    "loss_fn.reference_policy_kl_penalty=0.05",
    "generation.num_engines=1",
    "generation.max_new_tokens=6",
    "debug.tripwires=all",
    "logger.wandb.mode=disabled",
]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments that name a random model, and pictures."""
    path = tmp_path_factory.mktemp("task")
    make_checkpoint(path / "model", "qwen3_vl")
    for name in ("train", "validation"):
        write_records(path / "shapes", name, NUM_STEPS * NUM_PROMPTS, 5, SIDE)
    return [f"policy.model_name={path / 'model'}", f"vars.shapes={path / 'shapes'}"]


@pytest.fixture(scope="module")
def recorded(task: list[str], tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    directory = tmp_path_factory.mktemp("recorded")
    run = run_grpo(
        directory,
        [
            *SMALL,
            *task,
            "rollout.record=true",
            "rollout.dump_period=1",
            "data_plane.log_operations=true",
            "env.count.kind=function",
            "++env.count.options={function: 'tests.functional.image_models:varied', arguments: {}}",
        ],
        config=CONFIG,
    )
    assert run.returncode == 0, run.output
    return run


def test_the_engine_and_the_trainer_see_the_same_pictures_after_every_update(recorded: FinishedRun) -> None:
    assert len(recorded.metrics("train/token_mult_prob_error")) == NUM_STEPS
    for error in recorded.metrics("train/token_mult_prob_error"):
        assert error == pytest.approx(1.0, abs=1e-4)
    assert all(moved > 0 for moved in recorded.metrics("train/grad_norm"))


def test_pixels_are_stored_once_for_a_group(recorded: FinishedRun) -> None:
    one_copy = NUM_PROMPTS * PICTURE_BYTES
    for stored in recorded.metrics("data_plane/put/pixel_values/bytes"):
        assert one_copy <= stored < 1.02 * one_copy
    # Two replicas: each fetches a group at most once, for all stages and updates.
    assert all(got < 2.04 * one_copy for got in recorded.metrics("data_plane/fetch/pixel_values/bytes"))


def test_a_dump_says_where_an_image_is_and_leaves_its_pixels_out(recorded: FinishedRun) -> None:
    line = json.loads((recorded.run_dir / "rollouts" / "step_1.jsonl").read_text().splitlines()[0])
    assert line["prompt"] == "<image>red="
    assert line["images"][0].endswith(".png")
    assert "columns" not in line


def test_a_recording_has_the_pixels_and_other_layouts_train_from_it_alike(
    recorded: FinishedRun, task: list[str], tmp_path: Path
) -> None:
    directory = recorded.run_dir / "recorded"
    with np.load(directory / "step_1-0.npz") as entries:
        assert entries["column/pixel_values"].nbytes > NUM_PROMPTS * PICTURE_BYTES
    alone = ["policy.data_parallel_size=1", "policy.sequence_packing.enabled=false"]
    alone += ["policy.sequence_packing.share_prompts=false", f"rollout.replay={directory}"]
    replayed = run_grpo(tmp_path, [*SMALL, *task, *alone], config=CONFIG)
    assert replayed.returncode == 0, replayed.output
    for name in ("train/loss", "train/grad_norm", "train/token_mult_prob_error"):
        assert replayed.metrics(name) == pytest.approx(recorded.metrics(name), abs=1e-4, rel=1e-4)


def test_what_crosses_the_driver_does_not_depend_on_the_pictures_size(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    command = [sys.executable, "-m", "tests.functional.driver_traffic", str(tmp_path), "images"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout.splitlines()[-1])
    small, large = report["steps"]
    assert large["tokens"] > small["tokens"]
    # The larger pictures have 56,448 bytes of pixels more each.
    assert abs(large["bytes"] - small["bytes"]) / NUM_PROMPTS < 100
    assert report["tensor_libraries"] == []
