"""A whole run that trains adapters with Megatron-core: the engines sample from what they add to the model."""

from __future__ import annotations

import json

import pytest
from safetensors.torch import load_file

from tests.functional.runs import SCORED, FinishedRun, run_grpo

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow, pytest.mark.whole_run]

NUM_STEPS = 3


@pytest.fixture(scope="module")
def adapted(arithmetic_model: str, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    run = run_grpo(
        tmp_path_factory.mktemp("adapted"),
        [
            "policy=megatron_lora",
            "policy.lora.rank=4",
            "policy.megatron_cfg.pipeline_model_parallel_size=2",
            "policy.data_parallel_size=1",
            "policy.optimizer.lr=0.002",
            "policy.scheduler.warmup_updates=2",
            "generation.num_engines=1",
            "loss_fn.reference_policy_kl_penalty=0.01",
            f"grpo.max_num_steps={NUM_STEPS}",
            "grpo.num_prompts_per_step=32",
            "grpo.val_at_start=false",
            "grpo.val_at_end=false",
            SCORED,
        ],
    )
    assert run.returncode == 0, run.output
    return run


def test_engines_sample_from_the_merged_weights(adapted: FinishedRun) -> None:
    errors = adapted.metrics("train/token_mult_prob_error")
    assert len(errors) == NUM_STEPS
    assert max(errors) < 1.00002


def test_the_policy_moves_away_from_the_reference_that_it_is_without_adapters(adapted: FinishedRun) -> None:
    first, *_, last = adapted.metrics("train/kl_penalty")
    assert last > first > 0


def test_the_trained_model_comes_with_its_adapters(adapted: FinishedRun) -> None:
    path = adapted.run_dir / "final_hf" / "adapter"
    assert json.loads((path / "adapter_config.json").read_text())["r"] == 4
    tensors = load_file(path / "adapter_model.safetensors")
    assert len(tensors) == 2 * 7 * 2  # layers, linear layers of each, A and B
    assert all(tensor.abs().max() > 0 for tensor in tensors.values())
