"""Whole runs of a mixture whose trainer replays what the engines' routers chose: further ones than the run of
``test_mixture_run``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.functional.runs import FinishedRun, run_grpo

pytestmark = [pytest.mark.whole_run, pytest.mark.timeout(300), pytest.mark.slow]

CONFIG = "configs/grpo_arithmetic_moe_cpu.yaml"
NUM_STEPS, NUM_PROMPTS, NUM_GENERATIONS = 3, 16, 4
REPLAY = "policy.megatron_cfg.router_replay=true"
SMALL = [
    f"grpo.max_num_steps={NUM_STEPS}",
    f"grpo.num_prompts_per_step={NUM_PROMPTS}",
    f"grpo.num_generations_per_prompt={NUM_GENERATIONS}",
    *("grpo.skip_idle_samples=false", "grpo.samples_kept_together=1", "grpo.mix_groups_in_updates=false"),
    *("grpo.val_period=0", "grpo.val_at_start=false", "grpo.val_at_end=false"),
    "policy.train_global_batch_size=32",
    "policy.scheduler.warmup_updates=0",
    "generation.num_engines=1",
    "checkpointing.export_final_hf=false",
    "debug.tripwires=all",
    "logger.wandb.mode=disabled",
]


def finished(directory: Path, overrides: Sequence[str]) -> FinishedRun:
    run = run_grpo(directory, [*SMALL, *overrides], config=CONFIG)
    assert run.returncode == 0, run.output
    return run


@pytest.fixture(scope="module")
def recorded(mixture_model: str, tmp_path_factory: pytest.TempPathFactory) -> FinishedRun:
    """Two expert-parallel workers that share prompts, and one engine."""
    return finished(
        tmp_path_factory.mktemp("recorded"), [REPLAY, "rollout.record=true", "rollout.dump_period=1"]
    )


def assert_agreement(run: FinishedRun) -> None:
    """In every step, so after every weight update too."""
    assert len(run.metrics("train/routing_disagreement")) == NUM_STEPS
    assert max(run.metrics("train/routing_disagreement")) < 1e-3
    assert max(run.metrics("train/token_mult_prob_error")) < 1.00001
    assert min(run.metrics("train/grad_norm")) > 0


def test_engine_and_trainer_choose_alike_after_every_update(recorded: FinishedRun) -> None:
    assert_agreement(recorded)


def test_a_recording_is_replayed_with_its_experts_and_without(
    recorded: FinishedRun, tmp_path: Path, mixture_model: str
) -> None:
    replay = f"rollout.replay={recorded.run_dir / 'recorded'}"
    again = finished(tmp_path / "again", [REPLAY, replay])
    for name in ("train/loss", "train/grad_norm", "train/routing_disagreement"):
        assert again.metrics(name) == recorded.metrics(name)
    without = finished(tmp_path / "without", [replay])
    assert without.metrics("train/routing_disagreement") == []
    # Routers that choose for themselves choose alike until the first update.
    first, other = (run.metrics("train/token_mult_prob_error")[0] for run in (recorded, without))
    assert other == pytest.approx(first, abs=1e-6)
    assert without.metrics("train/grad_norm") != recorded.metrics("train/grad_norm")


@pytest.mark.parametrize(
    "layout",
    [
        # An engine of two workers; expert weights on each of two tensor-parallel ranks.
        [
            "generation.vllm_cfg.tensor_parallel_size=2",
            "policy.data_parallel_size=1",
            "policy.megatron_cfg.tensor_model_parallel_size=2",
            "policy.megatron_cfg.sequence_parallel=true",
            "policy.megatron_cfg.activation_checkpointing=true",
            "policy.sequence_packing.share_prompts=false",
        ],
        [
            "generation.num_engines=2",
            "policy.data_parallel_size=1",
            "policy.megatron_cfg.expert_model_parallel_size=1",
            "policy.megatron_cfg.pipeline_model_parallel_size=2",
            "policy.sequence_packing.enabled=false",
            "policy.sequence_packing.share_prompts=false",
        ],
        ["loss_fn.use_generation_logprobs_as_prev=true", "loss_fn.reference_policy_kl_penalty=0.01"],
    ],
    ids=["engine TP2", "two engines, PP2", "engine log-probs as prev"],
)
def test_it_holds_in_other_layouts(layout: list[str], tmp_path: Path, mixture_model: str) -> None:
    assert_agreement(finished(tmp_path, [REPLAY, *layout]))


def test_conversations_of_several_turns_bring_the_experts_of_all_their_tokens(
    tmp_path: Path, mixture_model: str
) -> None:
    assert_agreement(
        finished(
            tmp_path,
            [
                REPLAY,
                *("env@env.arithmetic=custom", "env.arithmetic.max_turns=3"),
                "env.arithmetic.options.target=tests.functional.routed_turns:Again",
                *("policy.max_total_sequence_length=96", "policy.sequence_packing.share_prompts=false"),
            ],
        )
    )
