"""Whole runs of PPO: a critic beside the policy, killed, stopped and continued, on other layouts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from nemo_like.observability.jsonl import without_measurements
from tests.functional.runs import FinishedRun, read_metrics, run_grpo, running, wait_until_gone

pytestmark = [pytest.mark.timeout(900), pytest.mark.whole_run]

CONFIG = "configs/ppo_arithmetic_cpu.yaml"
NUM_STEPS = 5
SMALL = [
    *("grpo.num_prompts_per_step=32", "policy.train_global_batch_size=32"),
    *(f"grpo.max_num_steps={NUM_STEPS}", "grpo.val_at_start=false", "grpo.val_at_end=false"),
    *("grpo.val_period=0", "value.warmup_steps=1", "value.num_epochs_per_rollout=2"),
    *("checkpointing.save_period=1", "checkpointing.keep_top_k=null", "logger.wandb.mode=disabled"),
    *("generation.num_engines=1", "data_plane.backend=in_memory"),
    *("checkpointing.export_final_hf=false", "rollout.record=true", "cluster.max_restarts=5"),
    # At the demo's rate, 2e-3, a difference of 1e-6 between two layouts is one of 1e-3 a step later.
    "value.optimizer.lr=2e-4",
]
TOLERANCE = 1e-4


def ppo(
    directory: Path, arguments: Sequence[str] = (), name: str | None = None, num_steps: int = NUM_STEPS
) -> FinishedRun:
    run = run_grpo(directory, [*SMALL, f"grpo.max_num_steps={num_steps}", *arguments], name, CONFIG)
    assert run.returncode == 0, run.output
    return run


def exact(run_dir: Path) -> list[dict[str, Any]]:
    return [without_measurements(record) for record in read_metrics(run_dir)]


@pytest.fixture(scope="module")
def undisturbed(arithmetic_model: str, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    return ppo(tmp_path_factory.mktemp("undisturbed"))


def test_the_critic_trains_in_every_step_and_the_policy_after_the_warm_up(undisturbed: FinishedRun) -> None:
    records = undisturbed.records()
    assert [record["train/policy_version"] for record in records] == [0, 0, 1, 2, 3]
    assert ["train/grad_norm" in record for record in records] == [False, True, True, True, True]
    assert all(record["train/value/grad_norm"] > 0 for record in records)
    # The value head starts at 0, so the first values are all 0 and the first returns are the rewards.
    assert records[0]["train/value/explained_variance"] == pytest.approx(0.0, abs=0.02)
    assert min(record["train/value/mean"] for record in records[1:]) > 0.01


@pytest.mark.slow
def test_a_killed_value_worker_costs_a_restart_and_changes_no_metric(
    undisturbed: FinishedRun, tmp_path: Path
) -> None:
    plan = "value_worker-1:values@2,value_worker-0:value_train@4"
    program = ["-m", "tests.functional.killing_run", plan]
    with running(tmp_path, SMALL, None, CONFIG, program) as (process, mark, run_dir):
        output, _ = process.communicate(timeout=800)
    assert process.returncode == 0, output
    assert "actor 'value_worker-1' died during stage 'value.compute_values'" in output
    assert "actor 'value_worker-0' died during stage 'value.train'" in output
    assert "(restart 2 of 5)" in output
    assert exact(run_dir) == exact(undisturbed.run_dir)
    assert wait_until_gone(mark) == []


@pytest.mark.slow
def test_a_run_that_stopped_continues_exactly(undisturbed: FinishedRun, tmp_path: Path) -> None:
    stopped = ppo(tmp_path, num_steps=2)
    assert [path.name for path in sorted((stopped.run_dir / "checkpoints" / "step_2").iterdir())] == [
        "manifest.json",
        "policy",
        "training_state.json",
        "value",
    ]
    continued = ppo(tmp_path, name=stopped.run_dir.name)
    assert exact(continued.run_dir) == exact(undisturbed.run_dir)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(["value.backend=fsdp"], id="critic on FSDP"),
        pytest.param(
            [
                "value.data_parallel_size=1",
                "value.megatron_cfg.tensor_model_parallel_size=2",
                "value.sequence_packing.enabled=false",
                "value.sequence_packing.share_prompts=false",
            ],
            id="critic on TP 2, padded",
        ),
        pytest.param(
            ["value.data_parallel_size=1", "value.megatron_cfg.pipeline_model_parallel_size=2"],
            id="critic on PP 2",
        ),
        pytest.param(
            [
                *("policy.data_parallel_size=1", "value.data_parallel_size=2"),
                "policy.sequence_packing.share_prompts=false",
            ],
            id="policy on DP 1",
        ),
    ],
)
def test_other_layouts_train_alike_on_one_recorded_rollout(
    undisturbed: FinishedRun, layout: Sequence[str], tmp_path: Path
) -> None:
    recorded = undisturbed.run_dir / "recorded"
    own = [f"rollout.replay={recorded}", "rollout.record=false", *layout]
    again = ppo(tmp_path, own)
    for before, after in zip(undisturbed.records(), again.records(), strict=True):
        for name in ("loss", "grad_norm", "value/loss", "value/grad_norm", "value/explained_variance"):
            key = f"train/{name}"
            assert after.get(key) == (
                None if key not in before else pytest.approx(before[key], abs=TOLERANCE, rel=TOLERANCE)
            )


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_demo_learns_with_a_critic(arithmetic_model: str, seed: int, tmp_path: Path) -> None:
    own = [f"grpo.seed={seed}", "logger.wandb.mode=disabled"]
    run = run_grpo(tmp_path, own, None, CONFIG, timeout_s=850)
    assert run.returncode == 0, run.output
    accuracy = run.metrics("validation/accuracy")
    assert accuracy[0] < 0.5
    assert accuracy[-1] > 0.85
