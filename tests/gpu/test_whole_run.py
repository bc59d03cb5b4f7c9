"""A run of the demo's configuration for one GPU, which trainer and engine share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.functional.runs import run_grpo

pytestmark = [pytest.mark.gpu, pytest.mark.engine, pytest.mark.whole_run, pytest.mark.timeout(400)]

NUM_STEPS = 6


def test_trainer_and_engine_share_a_gpu(arithmetic_model: str, tmp_path: Path) -> None:
    overrides = [f"grpo.max_num_steps={NUM_STEPS}", f"policy.model_name={arithmetic_model}"]
    run = run_grpo(tmp_path, overrides, config="configs/grpo_arithmetic_gpu.yaml")
    assert run.returncode == 0, run.output
    assert run.metrics("train/policy_version") == [float(version) for version in range(NUM_STEPS)]
    assert max(run.metrics("train/token_mult_prob_error")) < 1.05
    assert all(0 < norm < 100 for norm in run.metrics("train/grad_norm"))
    assert min(run.metrics("train/reward")) > 0.1  # before the first update it is 0.3
    assert run.metrics("weight_sync/weight_sync_bytes")[-1] > 0
    assert max(run.metrics("performance/gpu/policy_worker/memory_peak_share"), default=0) < 1
    assert run.processes_left() == []
