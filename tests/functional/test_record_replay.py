"""Dynamic sampling, recording, replaying and generating alone, over the real components."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from nemo_like.observability.jsonl import without_measurements
from tests.functional.runs import FinishedRun, run_grpo

pytestmark = pytest.mark.timeout(300)

NUM_STEPS, NUM_PROMPTS, NUM_GENERATIONS = 2, 32, 2
NO_VALIDATION = ["grpo.val_at_start=false", "grpo.val_at_end=false", "grpo.val_period=0"]
# In groups of two the untrained model gives the same reward to more than half of the prompts' answers.
SMALL = [
    f"grpo.max_num_steps={NUM_STEPS}",
    f"grpo.num_prompts_per_step={NUM_PROMPTS}",
    f"grpo.num_generations_per_prompt={NUM_GENERATIONS}",
    "grpo.use_dynamic_sampling=true",
    "policy.train_global_batch_size=32",
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
    return finished(tmp_path_factory.mktemp("recorded"), ["rollout.record=true"])


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
        # Every group that trained had one right and one wrong answer, unlike what was generated.
        assert record["train/filtered_reward"] == 0.5
        assert record["train/baseline_reward/pct_mixed"] < 70


def test_a_replay_without_engines_trains_exactly_as_the_recorded_run_did(
    recorded: FinishedRun, tmp_path: Path
) -> None:
    replayed = finished(tmp_path, [f"rollout.replay={recorded.run_dir / 'recorded'}"])
    assert process_names(replayed) == {"data_plane", "policy_worker", "rollout"}
    for key in ("train/loss", "train/grad_norm"):
        assert replayed.metrics(key) == recorded.metrics(key)
        assert min(map(abs, replayed.metrics(key))) > 0
    for old, new in zip(recorded.records(), replayed.records(), strict=True):
        expected = without_measurements(old)
        assert without_measurements(new) == {
            key: value for key, value in expected.items() if not key.startswith("weight_sync/")
        }


def test_generation_alone_samples_what_the_first_step_of_training_does(
    recorded: FinishedRun, tmp_path: Path
) -> None:
    generated = finished(tmp_path, ["rollout.generate_only=true", "grpo.max_num_steps=1"])
    assert process_names(generated) == {"data_plane", "engine", "environment", "rollout"}
    (record,) = generated.records()
    for key in ("train/reward", "train/total_num_tokens", "train/dynamic_sampling_num_uniform"):
        assert record[key] == recorded.metrics(key)[0]


def test_too_few_groups_within_the_allowed_rollouts_end_the_run_with_the_reason(
    arithmetic_model: str, tmp_path: Path
) -> None:
    limits = ["rollout.generate_only=true", "grpo.dynamic_sampling_max_gen_batches=1"]
    run = run_grpo(tmp_path, [*SMALL, *limits])
    assert run.returncode == 1
    assert "grpo.dynamic_sampling_max_gen_batches=1 allows no more" in run.output
    assert "Traceback" not in run.output
    assert run.processes_left() == []
