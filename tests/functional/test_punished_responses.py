"""Responses of a wrong form in whole runs: what is looked for are marks that tiny models do write."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.functional.runs import FEWEST_PROCESSES, FinishedRun, run_grpo

pytestmark = [pytest.mark.slow, pytest.mark.whole_run, pytest.mark.timeout(600)]

SMALL = [
    *FEWEST_PROCESSES,
    *("grpo.max_num_steps=2", "grpo.num_prompts_per_step=16", "grpo.num_generations_per_prompt=4"),
    *("policy.train_global_batch_size=16", "grpo.val_at_start=false", "grpo.val_at_end=false"),
    *("grpo.val_period=0", "checkpointing.enabled=false", "checkpointing.export_final_hf=false"),
    # Losses and gradients are computed a second time.
    *("logger.wandb.mode=disabled", "debug.tripwires=all"),
]


def check(run: FinishedRun, share: str) -> None:
    assert run.returncode == 0, run.output
    assert all(0 < value < math.inf for value in run.metrics("train/grad_norm"))
    assert len(run.metrics(share)) == 2
    assert any(0 < value < 1 for value in run.metrics(share))


def test_malformed_thoughts_are_punished_beside_a_critic(arithmetic_model: str, tmp_path: Path) -> None:
    form = ["loss_fn.malformed_thinking_advantage=-2", "rollout.thinking_marks=['1','2']"]
    run = run_grpo(tmp_path, [*SMALL, *form], config="configs/ppo_arithmetic_cpu.yaml")
    check(run, "train/env/arithmetic/malformed_thinking_share")


def test_a_malformed_thought_takes_a_right_answer_its_reward(arithmetic_model: str, tmp_path: Path) -> None:
    marks = "rollout.thinking_marks=['0','1']"
    plain = run_grpo(tmp_path / "plain", [*SMALL, marks])
    assert plain.returncode == 0, plain.output
    run = run_grpo(tmp_path / "punished", [*SMALL, marks, "rollout.no_reward_for=[malformed_thinking]"])
    check(run, "train/env/arithmetic/malformed_thinking_share")
    assert 0 < run.metrics("train/reward")[0] < plain.metrics("train/reward")[0]


def test_malformed_thoughts_are_punished_response_by_response_in_sessions_of_agents(
    sums_model: str, tmp_path: Path
) -> None:
    form = ["loss_fn.malformed_thinking_advantage=-2", "rollout.thinking_marks=['1','2']"]
    run = run_grpo(tmp_path, [*SMALL, *form], config="configs/grpo_agent_cpu.yaml")
    check(run, "train/env/sums/malformed_thinking_share")
