"""Whole runs of a model that reads images: sampled, trained, recorded, replayed; no pixel at the driver."""

from __future__ import annotations

import json
import re
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_like.configuration import load_config
from nemo_like.rollout.recorder import read_step
from scripts.demo_model.shapes import SIDE, write_records
from tests.functional import driver_traffic
from tests.functional.image_models import DenseImageReference, make_checkpoint
from tests.functional.runs import ROOT, SCORED, FinishedRun, run_grpo

pytestmark = [pytest.mark.whole_run, pytest.mark.timeout(300)]

CONFIG = "configs/grpo_shapes_vlm_cpu.yaml"
NUM_STEPS, NUM_PROMPTS, NUM_GENERATIONS = 3, 8, 4
STEPS = range(1, NUM_STEPS + 1)
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
    *("generation.num_engines=1", "data_plane.backend=in_memory"),
    "generation.max_new_tokens=6",
    "policy.scheduler.decay_style=constant",
    "policy.max_total_sequence_length=64",
    "data.shuffle=false",
    "debug.tripwires=all",
    "logger.wandb.mode=disabled",
]
# Every small letter ends a response, which a random model seldom does otherwise. Two of three responses are
# answered with a picture, some of them with one that is not there.
LETTERS = f"generation.stop_strings=[{','.join(string.ascii_lowercase)}]"
LOOKING = ["env.count.kind=custom", "env.count.max_turns=3", "env.count.max_failed_share=1"]
REMOVED = "train/00021.png"  # a picture of step 3, gone before step 1


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Arguments that name a random model, pictures, and an environment that answers with pictures."""
    path = tmp_path_factory.mktemp("task")
    make_checkpoint(path / "model", "qwen3_vl")
    options = f"height: 28, missing_of: 7, removes: {path / 'shapes' / REMOVED}"
    looking = f"{{target: 'tests.functional.looking:Looking', arguments: {{{options}}}}}"
    for name in ("train", "validation"):
        write_records(path / "shapes", name, NUM_STEPS * NUM_PROMPTS, 5, SIDE)
    return [
        f"policy.model_name={path / 'model'}",
        f"vars.shapes={path / 'shapes'}",
        f"++env.count.options={looking}",
        *LOOKING,
    ]


@pytest.fixture(scope="module")
def recorded(task: list[str], tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    directory = tmp_path_factory.mktemp("recorded")
    run = run_grpo(
        directory,
        [
            *SMALL,
            *task,
            LETTERS,
            "rollout.record=true",
            "rollout.dump_period=1",
            "rollout.keep_messages=true",
            "data_plane.log_operations=true",
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


def lines_of(run: FinishedRun, step: int) -> list[dict[str, Any]]:
    """The dump's lines, by (group, generation)."""
    text = (run.run_dir / "rollouts" / f"step_{step}.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_pixels_are_stored_once_for_a_group_and_once_for_a_sample_that_saw_them(
    recorded: FinishedRun,
) -> None:
    for step in STEPS:
        lines = lines_of(recorded, step)
        prompts = len({line["group"] for line in lines if line["num_turns"]})
        observed = sum(
            turn["content"].count("<image>")
            for line in lines
            for turn in line["turns"]
            if turn["role"] == "environment"
        )
        for name, num_bytes in (
            ("pixel_values", prompts * PICTURE_BYTES),
            ("observed_pixel_values", observed * PICTURE_BYTES // 2),
        ):
            stored = recorded.metrics(f"data_plane/put/{name}/bytes")[step - 1]
            assert num_bytes <= stored < 1.02 * num_bytes + 4096, name
            # Two replicas: each fetches a value at most once, for all stages and updates.
            fetched = recorded.metrics(f"data_plane/fetch/{name}/bytes")[step - 1]
            assert fetched < 2.04 * num_bytes + 8192, name


def test_a_dump_says_where_an_image_is_and_leaves_its_pixels_out(recorded: FinishedRun) -> None:
    line = next(line for line in lines_of(recorded, 1) if line["num_turns"] > 1)
    assert line["prompt"] == "<image>red="
    assert line["images"][0].endswith(".png")
    assert line["turns"][1] == {"role": "environment", "content": "=<image>"}
    assert line["columns"].keys() == {"messages"}
    asked, said, seen, *_ = line["columns"]["messages"]
    assert asked["content"] == [
        {"type": "image", "path": line["images"][0]},
        {"type": "text", "text": "red="},
    ]
    assert said == line["turns"][0]
    assert (seen["role"], seen["content"][1]["type"]) == ("user", "image")
    assert seen["content"][1]["bytes"].endswith(" bytes")


def test_a_picture_that_cannot_be_read_fails_its_samples_and_nothing_else(recorded: FinishedRun) -> None:
    num_missing = 0
    for step in STEPS:
        for line in lines_of(recorded, step):
            failure = line["failure"]
            if line["images"][0].endswith(REMOVED):
                assert f"{REMOVED} cannot be read" in failure
                assert line["num_turns"] == 0
            elif failure is not None:
                assert "the observation, image 1: /no/such/picture.png cannot be read" in failure
                num_missing += 1
            assert line["sample_mask"] == (failure is None)
    assert 0 < num_missing < 10
    num_failed = num_missing + NUM_GENERATIONS
    assert sum(recorded.metrics("train/num_failed_rewards")) == num_failed
    # The terminal has the first of a kind, the log all of them.
    assert recorded.output.count("(bad_image): ") == 1
    share = num_failed / (NUM_STEPS * NUM_PROMPTS * NUM_GENERATIONS)
    assert f"failed rewards   {share:.1%} in training" in recorded.output
    log = (recorded.run_dir / "logs" / "rollout.log").read_text()
    told = re.findall(r"training step \d, prompt \d+, sample \d, environment count: ", log)
    assert len(told) == num_failed


def recorded_batch(run: FinishedRun, step: int) -> dict[str, Any]:
    """What a step trained on: the recorded columns, with advantages and masks of the dump."""
    flat, lines = read_step(run.run_dir / "recorded", step), lines_of(run, step)
    return {
        # torch warns of arrays that it may not write to.
        "columns": {
            name: values.copy() if isinstance(values, np.ndarray) else values
            for name, values in flat.columns.items()
        },
        "lengths": flat.lengths,
        "tags": {
            "advantage": [line["advantage"] or 0.0 for line in lines],
            "sample_mask": [line["sample_mask"] for line in lines],
        },
    }


def test_transformers_and_adamw_make_the_same_updates_of_the_recorded_rollouts(
    recorded: FinishedRun, task: list[str]
) -> None:
    cfg = load_config(CONFIG, [*SMALL, *task])
    dense, initial = (DenseImageReference(cfg.policy, cfg.loss_fn, 1.0) for _ in range(2))
    num_samples, size = NUM_PROMPTS * NUM_GENERATIONS, cfg.policy.train_global_batch_size
    for step in STEPS:
        batch = recorded_batch(recorded, step)
        with torch.no_grad():
            prev, reference = dense.logprobs(batch), initial.logprobs(batch)
        updates = [
            dense.update(batch, [*range(start, start + size)], prev, reference, cfg.policy.optimizer.lr)
            for start in range(0, num_samples, size)
        ]
        assert len(updates) == 2
        for name, values in (
            ("loss", [update.loss for update in updates]),
            ("grad_norm", [update.grad_norm for update in updates]),
        ):
            trained = recorded.metrics(f"train/{name}")[step - 1]
            assert trained == pytest.approx(np.mean(values), rel=1e-4, abs=1e-6), (name, step)


@pytest.mark.slow
def test_a_recording_has_the_pixels_and_other_layouts_train_from_it_alike(
    recorded: FinishedRun, task: list[str], tmp_path: Path
) -> None:
    directory = recorded.run_dir / "recorded"
    alone = ["policy.data_parallel_size=1", "policy.sequence_packing.enabled=false"]
    alone += ["policy.sequence_packing.share_prompts=false", f"rollout.replay={directory}"]
    # The usual loss, which reads the conversations that were recorded.
    alone += ["loss_fn.kind=tests.functional.looking:as_said"]
    replayed = run_grpo(tmp_path, [*SMALL, *task, *alone], config=CONFIG)
    assert replayed.returncode == 0, replayed.output
    for name in ("train/loss", "train/grad_norm", "train/token_mult_prob_error"):
        assert replayed.metrics(name) == pytest.approx(recorded.metrics(name), abs=1e-4, rel=1e-4)


@pytest.mark.slow
def test_what_crosses_the_driver_does_not_depend_on_the_pictures_size(tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "model")
    command = [sys.executable, "-m", "tests.functional.driver_traffic", str(tmp_path), "images"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout.splitlines()[-1])
    small, large = report["steps"]
    assert large["tokens"] > small["tokens"]
    # Eight samples have one copy of a prompt's pixels, as four have above.
    stored = large["columns"]["pixel_values"]
    assert PICTURE_BYTES <= stored / driver_traffic.NUM_PROMPTS < 1.02 * PICTURE_BYTES
    assert large["columns"]["observed_pixel_values"] > 1.5 * small["columns"]["observed_pixel_values"]
    assert large["columns"]["messages"] > 0
    # The pixels of the larger pictures, in prompts alone, have three quarters of ``stored`` more.
    assert abs(large["bytes"] - small["bytes"]) < 1e-3 * stored
    assert report["control"] > stored
    assert report["tensor_libraries"] == []
