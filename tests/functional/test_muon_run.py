"""A whole run learns by Muon, at the learning rate that the demo has for AdamW."""

from __future__ import annotations

import pytest

from tests.functional.runs import FEWEST_PROCESSES, run_grpo

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow, pytest.mark.whole_run]


@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_the_policy_learns_by_muon(
    backend: str, arithmetic_model: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = run_grpo(
        tmp_path_factory.mktemp(backend),
        [
            *(
                "policy.optimizer.kind=muon",
                f"policy.backend={backend}",
                "policy.scheduler.warmup_updates=12",
            ),
            *("grpo.max_num_steps=20", "grpo.num_prompts_per_step=64", "checkpointing.enabled=false"),
            *("grpo.val_period=20", "grpo.max_val_samples=256", *FEWEST_PROCESSES),
        ],
    )
    assert run.returncode == 0, run.output
    rewards = run.metrics("train/reward")
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.12
    accuracies = run.metrics("validation/accuracy")
    assert accuracies[-1] > accuracies[0] + 0.12
