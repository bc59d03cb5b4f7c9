"""A weight that did not reach the engines is noticed at the first step that samples without it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.functional.runs import RUN_TIMEOUT_S, FinishedRun, running

pytestmark = [pytest.mark.timeout(400), pytest.mark.whole_run, pytest.mark.slow]

NUM_STEPS = 2
SMALL = [
    f"grpo.max_num_steps={NUM_STEPS}",
    "grpo.num_prompts_per_step=64",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "policy.data_parallel_size=1",
    "policy.train_global_batch_size=64",  # 8 updates a step
    "policy.scheduler.warmup_updates=8",  # a step that changes something
    "generation.num_engines=1",
    "checkpointing.export_final_hf=false",
    "logger.wandb.mode=disabled",
]


def run_stale(directory: Path, weight: str, *overrides: str) -> FinishedRun:
    """Two steps with an engine whose ``weight`` stays what it was."""
    program = ("-m", "tests.functional.stale_run", weight)
    with running(directory, [*SMALL, *overrides], program=program) as (process, mark, run_dir):
        output, _ = process.communicate(timeout=RUN_TIMEOUT_S)
        return FinishedRun(process.returncode, output, run_dir, mark, [])


@pytest.mark.parametrize(
    ("weight", "tripwires"),
    [
        pytest.param("lm_head", ["agreement"], id="lm_head"),
        pytest.param("layers.1.mlp.down_proj", ["agreement", "weights_digest"], id="down_proj"),
    ],
)
def test_a_stale_weight_ends_the_run_at_the_first_step_that_it_spoils(
    arithmetic_model: str, tmp_path: Path, weight: str, tripwires: list[str]
) -> None:
    run = run_stale(tmp_path, weight)
    assert run.returncode == 1, run.output
    errors = run.metrics("train/token_mult_prob_error")
    assert errors[0] < 1.00002 < errors[1]
    assert "The run failed: at step 2, tripwire 'agreement': token_mult_prob_error is" in run.output
    assert f"is {errors[1]:.7g}, over 1.00002 (float32 on cpu)" in run.output
    assert sorted(re.findall(r"tripwire '(\w+)'", run.output)) == tripwires
    assert "debug.tripwires=off turns the tripwires off" in run.output
    assert "Traceback" not in run.output
    assert not list((run.run_dir / "checkpoints").glob("step_2"))
    assert run.processes_left() == []


def test_without_tripwires_a_limit_of_ones_own_still_ends_the_run(
    arithmetic_model: str, tmp_path: Path
) -> None:
    limit = "grpo.max_token_mult_prob_error=1.00002"
    run = run_stale(tmp_path, "layers.0.self_attn.q_norm", limit, "debug.tripwires=off")
    assert run.returncode == 1, run.output
    errors = run.metrics("train/token_mult_prob_error")
    assert errors[0] < 1.00002 < errors[1]
    assert f"is {errors[1]:.7g}, over grpo.max_token_mult_prob_error=1.00002" in run.output
    assert re.findall(r"tripwire '(\w+)'", run.output) == ["agreement"]
