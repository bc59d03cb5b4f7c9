"""Dynamic sampling, recording, replaying and generating alone, over the real components."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from nemo_like.environments.interface import Turn
from nemo_like.observability.jsonl import without_measurements
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
    "env.arithmetic.kind=function",
    "++env.arithmetic.options.function='tests.functional.uniform_rewards:mostly_uniform'",
    "++env.arithmetic.options.arguments={}",
    "policy.train_global_batch_size=32",
    "policy.backend=fsdp",
    "policy.data_parallel_size=1",
    "policy.scheduler.decay_style=constant",
    "generation.num_engines=1",
    "checkpointing.export_final_hf=false",
    "logger.wandb.mode=disabled",
    *NO_VALIDATION,
]


def finished(directory: Path, overrides: Sequence[str]) -> FinishedRun:
    run = run_grpo(directory, [*SMALL, *overrides])
    assert run.returncode == 0, run.output
    return run


@pytest.fixture(scope="module")
def recorded(arithmetic_model: str, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return finished(tmp_path_factory.mktemp("recorded"), ["rollout.record=true", "rollout.dump_period=1"])


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


def test_the_dump_says_of_every_generated_sample_what_became_of_it(recorded: FinishedRun) -> None:
    for record in recorded.records():
        path = recorded.run_dir / "rollouts" / f"step_{record['step']}.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
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
        path = recorded.run_dir / "rollouts" / f"step_{record['step']}.jsonl"
        tokens = [json.loads(line)["tokens"] for line in path.read_text().splitlines()]
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
    lines = (recorded.run_dir / "rollouts" / "step_2.jsonl").read_text().splitlines()
    assert shown.stdout.count("uniform_group") * NUM_GENERATIONS == sum("uniform_group" in x for x in lines)
    missing = subprocess.run([*command, "9"], cwd=ROOT, capture_output=True, text=True)
    assert missing.returncode == 2
    assert "there are steps 1, 2" in missing.stderr


def test_a_replay_without_engines_trains_exactly_as_the_recorded_run_did(
    recorded: FinishedRun, tmp_path: Path
) -> None:
    replayed = finished(tmp_path, [f"rollout.replay={recorded.run_dir / 'recorded'}"])
    assert process_names(replayed) == {"data_plane", "policy_worker", "rollout"}
    for key in ("train/loss", "train/grad_norm"):
        assert replayed.metrics(key) == recorded.metrics(key)
        assert min(map(abs, replayed.metrics(key))) > 0
    for old, new in zip(recorded.records(), replayed.records(), strict=True):
        expected = without_dump(old)
        assert without_measurements(new) == {
            key: value for key, value in expected.items() if not key.startswith("weight_sync/")
        }


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
