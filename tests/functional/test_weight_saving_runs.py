"""Whole runs that do not send all of the weights, with every tripwire on."""

from __future__ import annotations

import pytest

from tests.functional.runs import FinishedRun, run_grpo

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow, pytest.mark.whole_run]

NUM_STEPS = 3
SHORT = [
    f"grpo.max_num_steps={NUM_STEPS}",
    "grpo.num_prompts_per_step=16",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "generation.num_engines=1",
    "debug.tripwires=all",
]
ADAPTERS = ["policy.lora.enabled=true", "generation.lora_sync=adapter", "policy.lora.rank=8"]


@pytest.fixture(
    params=[
        ["policy.backend=fsdp", "policy.data_parallel_size=2", *ADAPTERS],
        [
            "policy.data_parallel_size=1",
            "policy.megatron_cfg.pipeline_model_parallel_size=2",
            "generation.weight_transport=collective",
            *ADAPTERS,
        ],
        ["policy.data_parallel_size=1", "generation.weight_delta=true"],
    ],
    ids=["fsdp-adapters", "megatron-pp2-adapters", "delta"],
    scope="module",
)
def run(
    request: pytest.FixtureRequest, arithmetic_model: str, tmp_path_factory: pytest.TempPathFactory
) -> FinishedRun:
    run = run_grpo(tmp_path_factory.mktemp("saving"), [*SHORT, *request.param])
    assert run.returncode == 0, run.output
    return run


def test_engines_sample_with_the_trainers_weights_and_the_run_says_what_it_saved(run: FinishedRun) -> None:
    assert max(run.metrics("train/token_mult_prob_error")) < 1.00002
    assert max(run.metrics("weight_sync/canary_gap")) < 1e-4
    saved = run.metrics("weight_sync/weight_sync_saved_bytes")
    sent = run.metrics("weight_sync/weight_sync_bytes")
    assert len(saved) == len(sent) == NUM_STEPS
    # Whatever is not sent is saved, of one size of the model.
    assert len({first + second for first, second in zip(saved, sent, strict=True)}) == 1
