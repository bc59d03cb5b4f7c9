"""A run that never scores before training: one update per rollout, corrected by the engine's log-probs."""

from __future__ import annotations

import pytest

from tests.functional.runs import FinishedRun, run_grpo

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow, pytest.mark.whole_run]

NUM_STEPS = 3


@pytest.fixture(scope="module")
def on_policy(arithmetic_model: str, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    run = run_grpo(
        tmp_path_factory.mktemp("on_policy"),
        [
            f"grpo.max_num_steps={NUM_STEPS}",
            "grpo.num_prompts_per_step=16",
            "grpo.val_at_start=false",
            "grpo.val_at_end=false",
            "policy.data_parallel_size=1",
            "generation.num_engines=1",
            "loss_fn.force_on_policy_ratio=true",
            "loss_fn.entropy_coef=0.001",
            "loss_fn.use_importance_sampling_correction=true",
            "loss_fn.truncated_importance_sampling_type=tis",
            "loss_fn.truncated_importance_sampling_ratio=2.0",
        ],
    )
    assert run.returncode == 0, run.output
    return run


def test_the_ratio_is_one_without_a_pass_that_scores(on_policy: FinishedRun) -> None:
    assert on_policy.metrics("train/probs_ratio") == [1.0] * NUM_STEPS
    assert all("train/max_seq_mult_prob_error" not in record for record in on_policy.records())


def test_trainer_and_engine_are_compared_in_training(on_policy: FinishedRun) -> None:
    errors = on_policy.metrics("train/token_mult_prob_error")
    assert len(errors) == NUM_STEPS
    assert max(errors) < 1.00002
    assert on_policy.metrics("train/is_oob_ratio") == [0.0] * NUM_STEPS


def test_the_exact_entropy_is_near_its_estimate_from_the_samples(on_policy: FinishedRun) -> None:
    exact, estimated = on_policy.metrics("train/entropy"), on_policy.metrics("train/approx_entropy")
    assert exact == pytest.approx(estimated, rel=0.2)
    assert min(exact) > 0.05
