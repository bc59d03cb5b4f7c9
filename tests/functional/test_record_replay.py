"""Dynamic sampling, recording, replaying and generating alone, with columns of a user's own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nemo_like.batch.recordings import read_manifest
from nemo_like.environments.interface import Turn
from nemo_like.observability.jsonl import without_measurements
from nemo_like.rollout.prompts import PromptBatch, RolloutMode
from nemo_like.rollout.recorder import read_rollout
from nemo_like.rollout.rollout_columns import recorded_columns
from tests.functional.mooncake_storage import in_mooncake
from tests.functional.runs import ROOT, FinishedRun, run_grpo, without_dump
from tests.functional.uniform_rewards import mostly_uniform

pytestmark = [pytest.mark.timeout(300), pytest.mark.whole_run]

NUM_STEPS, NUM_PROMPTS, NUM_GENERATIONS = 2, 16, 4
NO_VALIDATION = ["grpo.val_at_start=false", "grpo.val_at_end=false", "grpo.val_period=0"]
SMALL = [
    f"grpo.max_num_steps={NUM_STEPS}",
    f"grpo.num_prompts_per_step={NUM_PROMPTS}",
    f"grpo.num_generations_per_prompt={NUM_GENERATIONS}",
    "grpo.use_dynamic_sampling=true",
    # At least 70 % of the groups have equal rewards.
    "env.arithmetic.kind=custom",
    "++env.arithmetic.options={target: 'tests.functional.uniform_judge:UniformJudge', arguments: {}}",
    "loss_fn.kind=tests.functional.own_losses:credited",  # which reads the judge's columns
    "policy.train_global_batch_size=32",
    *("policy.data_parallel_size=1", "policy.megatron_cfg.tensor_model_parallel_size=2"),
    "policy.scheduler.decay_style=constant",
    "generation.num_engines=1",
    "checkpointing.export_final_hf=false",
    "logger.wandb.mode=disabled",
    *NO_VALIDATION,
]


def finished(directory: Path, overrides: Sequence[str]) -> FinishedRun:
    run = run_grpo(directory, [*SMALL, in_mooncake(), *overrides])
    assert run.returncode == 0, run.output
    return run


@pytest.fixture(scope="module")
def recorded(arithmetic_model: str, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return finished(tmp_path_factory.mktemp("recorded"), ["rollout.record=true", "rollout.dump_period=1"])


def dumped(run: FinishedRun, step: int) -> list[dict[str, Any]]:
    """What the dump says of a step's samples."""
    lines = (run.run_dir / "rollouts" / f"step_{step}.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def process_names(run: FinishedRun) -> set[str]:
    return set(json.loads((run.run_dir / "processes.json").read_text()))


def test_a_step_with_dynamic_sampling_trains_on_exactly_the_configured_number_of_groups(
    recorded: FinishedRun,
) -> None:
    num_samples = NUM_PROMPTS * NUM_GENERATIONS
    assert recorded.metrics("train/global_valid_seqs") == [num_samples] * NUM_STEPS
    for record in recorded.records():
        num_rollouts = record["train/dynamic_sampling_num_gen_batches"]
        assert num_rollouts >= 2
        num_dropped = (
            record["train/dynamic_sampling_num_uniform"] + record["train/dynamic_sampling_num_surplus"]
        )
        assert num_samples + num_dropped == num_rollouts * num_samples
        assert record["train/baseline_reward/pct_mixed"] < 50
        assert 0 < record["train/filtered_reward"] < record["train/reward"]


def test_the_engine_has_the_weights_of_both_tensor_parallel_workers_after_every_update(
    recorded: FinishedRun,
) -> None:
    errors = recorded.metrics("train/token_mult_prob_error")
    assert len(errors) == NUM_STEPS > 1
    assert max(errors) < 1.00002
    assert min(recorded.metrics("train/grad_norm")) > 0.01  # else the weights would be as they were


def test_the_dump_says_of_every_generated_sample_what_became_of_it(recorded: FinishedRun) -> None:
    for record in recorded.records():
        lines = dumped(recorded, int(record["step"]))
        outcomes = [line["outcome"] for line in lines]
        assert len(lines) == record["train/dynamic_sampling_num_gen_batches"] * NUM_PROMPTS * NUM_GENERATIONS
        assert outcomes.count("uniform_group") == record["train/dynamic_sampling_num_uniform"]
        assert outcomes.count("trained") == NUM_PROMPTS * NUM_GENERATIONS
        assert sum(line["reward"] for line in lines) / len(lines) == pytest.approx(record["train/reward"])
        for line in lines:
            (turn,) = line["turns"]
            assert line["reward"] == mostly_uniform(Turn(line["prompt"], turn["content"], "", False))
            assert ("advantage" in line) == (line["outcome"] == "trained")


def test_the_dump_has_the_entropy_at_each_token_that_was_scored(recorded: FinishedRun) -> None:
    for record in recorded.records():
        tokens = [line["tokens"] for line in dumped(recorded, int(record["step"]))]
        scored = [one for one in tokens if "prev_logprobs" in one]
        assert len(scored) == NUM_PROMPTS * NUM_GENERATIONS
        assert [one for one in tokens if "entropies" in one] == scored
        entropies, logprobs = (
            np.array([value for one in scored for value in one[name]])
            for name in ("entropies", "prev_logprobs")
        )
        assert len(entropies) == record["train/global_valid_toks"]
        assert entropies.min() > 0
        # The mean of -log p of what was sampled is an estimate of it.
        error = (entropies + logprobs).std() / len(entropies) ** 0.5
        assert abs((entropies + logprobs).mean()) < 5 * error


def test_a_person_can_read_the_best_and_the_worst_answer_of_each_group(recorded: FinishedRun) -> None:
    command = [sys.executable, "scripts/show_rollouts.py", str(recorded.run_dir), "--step"]
    shown = subprocess.run([*command, "2", "--limit", "100"], cwd=ROOT, capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("trained") == 2 * NUM_PROMPTS
    # Of a uniform group one answer says it all.
    outcomes = [line["outcome"] for line in dumped(recorded, 2)]
    assert shown.stdout.count("uniform_group") * NUM_GENERATIONS == outcomes.count("uniform_group")
    missing = subprocess.run([*command, "9"], cwd=ROOT, capture_output=True, text=True)
    assert missing.returncode == 2
    assert "there are steps 1, 2" in missing.stderr


def test_the_dump_has_the_columns_that_the_environment_brought(recorded: FinishedRun) -> None:
    for line in dumped(recorded, 1):
        (turn,) = line["turns"]
        columns, num_response = line["columns"], line["num_response_tokens"]
        assert columns["notes"] == {"said": turn["content"], "is_right": turn["content"] == line["answer"]}
        assert columns["level"] == 1.0 + line["prompt"].count("9")
        expected = [0.0] * line["num_prompt_tokens"] + np.linspace(1, 0.5, num_response).tolist()
        assert columns["deserved"] == pytest.approx(expected)


def test_the_recording_has_the_value_of_a_prompt_once(recorded: FinishedRun) -> None:
    directory = recorded.run_dir / "recorded"
    columns = recorded_columns(read_manifest(directory))
    prompts = PromptBatch(RolloutMode.training, 1, 0, tuple(range(NUM_PROMPTS)), NUM_GENERATIONS)
    read = read_rollout(directory, columns, prompts).flat.columns
    assert read["level"].shape == (NUM_PROMPTS,)
    assert len(read["notes"]) == NUM_PROMPTS * NUM_GENERATIONS
    assert len(read["deserved"]) == len(read["input_ids"])


def test_the_loss_reads_the_columns_of_every_token_that_trains(recorded: FinishedRun) -> None:
    for step, credit in enumerate(recorded.metrics("train/credit"), start=1):
        credits = [
            line["columns"]["level"] * one
            for line in dumped(recorded, step)
            if line["outcome"] == "trained"
            for one in line["columns"]["deserved"][line["num_prompt_tokens"] :]
        ]
        assert credit == pytest.approx(np.mean(credits), rel=1e-5)


def test_a_replay_without_engines_trains_exactly_as_the_recorded_run_did(
    recorded: FinishedRun, tmp_path: Path
) -> None:
    replayed = finished(tmp_path, [f"rollout.replay={recorded.run_dir / 'recorded'}"])
    workers = {"policy_worker-0", "policy_worker-1"}
    assert process_names(replayed) == {"data_plane", "rollout"} | workers
    for key in ("train/loss", "train/grad_norm", "train/credit"):
        assert replayed.metrics(key) == recorded.metrics(key)
        assert min(map(abs, replayed.metrics(key))) > 0
    for old, new in zip(recorded.records(), replayed.records(), strict=True):
        expected = without_dump(old)
        assert without_measurements(new) == {
            key: value for key, value in expected.items() if not key.startswith("weight_sync/")
        }


@pytest.mark.slow
def test_an_excerpt_has_samples_of_a_whole_dump_and_changes_no_metric(
    recorded: FinishedRun, tmp_path: Path
) -> None:
    run = finished(tmp_path, ["rollout.record=true", "rollout.excerpt_period=1", "rollout.excerpt_samples=9"])
    assert [*map(without_dump, run.records())] == [*map(without_dump, recorded.records())]
    for step in (1, 2):
        whole = {(one["group"], one["generation"]): one for one in dumped(recorded, step)}
        excerpt = dumped(run, step)
        # Two of 16 groups of four fit: the first, and that in the middle, of the step's first rollout.
        assert [(one["group"], one["generation"]) for one in excerpt] == [
            (group, generation) for group in (0, NUM_PROMPTS // 2) for generation in range(NUM_GENERATIONS)
        ]
        for one in excerpt:
            same = whole[one["group"], one["generation"]]
            same["tokens"].pop("entropies", None)  # which are computed for whole dumps alone
            assert one.pop("excerpt_of") == len(whole)
            assert one == same


@pytest.mark.slow
def test_generation_alone_samples_what_the_first_step_of_training_does(
    recorded: FinishedRun, tmp_path: Path
) -> None:
    generated = finished(tmp_path, ["rollout.generate_only=true", "grpo.max_num_steps=1"])
    assert process_names(generated) == {"data_plane", "engine", "environment", "rollout"}
    (record,) = generated.records()
    for key in ("train/reward", "train/total_num_tokens", "train/dynamic_sampling_num_uniform"):
        assert record[key] == recorded.metrics(key)[0]


@pytest.mark.slow
def test_too_few_groups_within_the_allowed_rollouts_end_the_run_with_the_reason(
    arithmetic_model: str, tmp_path: Path
) -> None:
    limits = ["rollout.generate_only=true", "grpo.dynamic_sampling_max_gen_batches=1"]
    run = run_grpo(tmp_path, [*SMALL, *limits])
    assert run.returncode == 1
    assert "grpo.dynamic_sampling_max_gen_batches=1 allows no more" in run.output
    assert "Traceback" not in run.output
    assert run.processes_left() == []
