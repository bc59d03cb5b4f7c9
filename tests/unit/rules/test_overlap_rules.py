"""What a run that trains while rollouts are under way refuses, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from nemo_like.configuration import Config, load_config
from nemo_like.preflight.run_warnings import staleness_warnings
from nemo_like.rules.overlap_rules import overlap_problems

CONFIG = Path(__file__).resolve().parents[3] / "configs/grpo_arithmetic_cpu.yaml"
Demo = Callable[..., Config]

EXACT = ("grpo.overlap=exact", "grpo.samples_kept_together=1")
STALE = ("grpo.max_staleness=2", "data_plane.max_open_partitions=4")  # as it is resolved for this staleness
IN_FLIGHT = (*STALE, "grpo.weight_updates=in_flight")
CORRECTED = (
    "loss_fn.use_generation_logprobs_as_prev=false",
    "loss_fn.use_importance_sampling_correction=true",
    "loss_fn.truncated_importance_sampling_type=tis",
    "loss_fn.truncated_importance_sampling_ratio=2.0",
)


@pytest.mark.parametrize("mode", [(), EXACT, STALE, IN_FLIGHT, (*EXACT, *IN_FLIGHT)])
def test_the_demo_runs_in_every_mode(demo: Demo, mode: tuple[str, ...]) -> None:
    assert list(overlap_problems(demo(*mode))) == []


@pytest.mark.parametrize(
    ("overrides", "key", "reason"),
    [
        ((*EXACT, "cluster.placement=colocated"), "grpo.overlap=exact", "needs engines apart"),
        ((*EXACT, "rollout.generate_only=true"), "grpo.overlap=exact", "nothing trains"),
        (
            ("rollout.max_tokens_per_step=2",),
            "rollout.max_tokens_per_step=2",
            "would do nothing with grpo.max_staleness=0",
        ),
        (
            (*STALE, "rollout.max_tokens_per_step=2", "generation.stop_strings=[no]"),
            "generation.stop_strings",
            "may lie across two pieces of a response",
        ),
        (
            ("rollout.follow_journal=runs/nothere",),
            "rollout.follow_journal=runs/nothere",
            "metrics do not depend on what ends first",
        ),
        (
            (*STALE, "rollout.follow_journal=runs/nothere"),
            "rollout.follow_journal=runs/nothere",
            "has no journal/",
        ),
        (
            (*EXACT, "grpo.adv_estimator.name=reinforce_plus_plus"),
            "grpo.adv_estimator.name=reinforce_plus_plus",
            "needs the whole batch",
        ),
        (
            (*EXACT, "grpo.sample_filters=[tests.functional.own_losses:keep]"),
            "grpo.sample_filters=tests.functional.own_losses:keep",
            "may compare the samples of the whole batch",
        ),
        (
            (*EXACT, "grpo.num_prompts_per_step=127", "policy.train_global_batch_size=127"),
            "grpo.num_prompts_per_step=127",
            "must be a multiple of policy.data_parallel_size=2",
        ),
        (
            ("grpo.overlap=exact",),
            "policy.train_global_batch_size=128",
            "must be a multiple of 512 with grpo.overlap=exact",
        ),
        (
            (*EXACT, "grpo.mix_groups_in_updates=false"),
            "grpo.mix_groups_in_updates=false",
            "wait for certain groups",
        ),
        (
            (*STALE, "cluster.placement=colocated"),
            "grpo.max_staleness=2",
            "they share its processors or GPUs",
        ),
        ((*STALE, "rollout.generate_only=true"), "grpo.max_staleness=2", "nothing trains"),
        ((*STALE, "rollout.replay=recorded"), "grpo.max_staleness=2", "nothing is generated"),
        ((*STALE, "debug.tripwires=all"), "debug.tripwires=all", "keeps rollouts under way"),
        (
            (*STALE, "loss_fn.force_on_policy_ratio=true"),
            "loss_fn.force_on_policy_ratio=true",
            "they are of older ones",
        ),
        (
            ("grpo.max_staleness=2", "data_plane.max_open_partitions=3"),
            "data_plane.max_open_partitions=3",
            "must be at least 4 with grpo.max_staleness=2",
        ),
        (
            (*IN_FLIGHT, "policy.lora.enabled=true", "generation.lora_sync=adapter"),
            "generation.lora_sync=adapter",
            "running samples have begun with",
        ),
        (
            (*IN_FLIGHT, "policy.megatron_cfg.router_replay=true"),
            "policy.megatron_cfg.router_replay=true",
            "computes tokens again",
        ),
    ],
)
def test_what_cannot_overlap_is_refused_by_name(
    demo: Demo, overrides: tuple[str, ...], key: str, reason: str
) -> None:
    (problem,) = overlap_problems(demo(*overrides))
    assert problem.key == key
    assert reason in problem.rule
    assert problem.remedy


def test_the_data_plane_has_room_for_every_step_under_way() -> None:
    for staleness, num_partitions in [(0, 2), (4, 6)]:
        cfg = load_config(CONFIG, [f"grpo.max_staleness={staleness}"])
        assert cfg.data_plane.max_open_partitions == num_partitions


@pytest.mark.parametrize(
    ("overrides", "is_told"),
    [
        ((), False),
        (STALE, False),  # the demo's ratio is to the engines' log-probs
        ((*STALE, *CORRECTED), False),
        ((*STALE, "loss_fn.use_generation_logprobs_as_prev=false"), True),
        (("loss_fn.use_generation_logprobs_as_prev=false",), False),
    ],
)
def test_stale_samples_without_a_correction_are_warned_of(
    demo: Demo, overrides: tuple[str, ...], is_told: bool
) -> None:
    notes = list(staleness_warnings(demo(*overrides)))
    assert bool(notes) == is_told
    assert not notes or "use_importance_sampling_correction=true is recommended" in notes[0]
