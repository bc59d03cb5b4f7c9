from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nemo_like.configuration import load_config
from nemo_like.policy.backends.learning_rate import learning_rate
from nemo_like.policy.options import Device, LRDecayStyle, OptimizerKind, PolicyConfig, SchedulerConfig
from nemo_like.tripwires.measured import Measured
from nemo_like.tripwires.update_checks import (
    entropy_alarms,
    finite_alarms,
    first_ratio_alarms,
    first_reference_alarms,
    group_setting_alarms,
    loss_alarms,
    optimizer_alarms,
    ratio_alarms,
    scheduled_rate,
    scheduled_rates,
    skipped_alarms,
)
from tests.unit.algorithms.loss_cases import CONFIG

POLICY = load_config(Path(__file__).resolve().parents[3] / "configs/grpo_arithmetic_cpu.yaml").policy


def test_the_loss_may_differ_by_rounding_alone() -> None:
    assert list(loss_alarms({Measured.loss_gradient_error: 2e-6, Measured.loss_error: 1e-6})) == []
    assert list(loss_alarms({})) == []
    (alarm,) = loss_alarms({Measured.loss_gradient_error: 0.5})
    assert "derivative by a log-prob differs from its formula by 0.5" in alarm.wrong
    assert len(list(loss_alarms({Measured.loss_error: math.inf}))) == 1


def ratios(low: float, high: float, clipped_low: float, clipped_high: float) -> dict[str, float]:
    return {
        "probs_ratio_min": low,
        "probs_ratio_max": high,
        "probs_ratio_clamped_min": clipped_low,
        "probs_ratio_clamped_max": clipped_high,
    }


def test_ratios_are_cut_at_the_configured_bounds() -> None:
    # Bounds 0.8 and 1.28.
    assert list(ratio_alarms(ratios(0.5, 2.0, 0.8, 1.28), CONFIG)) == []
    assert list(ratio_alarms(ratios(0.9, 1.1, 0.9, 1.1), CONFIG)) == []
    assert list(ratio_alarms({}, CONFIG)) == []
    (alarm,) = ratio_alarms(ratios(0.9, 2.0, 0.9, 1.2), CONFIG)
    assert "after clipping 1.2, not 1.28" in alarm.wrong


def test_the_first_update_begins_where_scoring_ended() -> None:
    assert list(first_ratio_alarms({Measured.first_ratio_gap: 1e-6}, POLICY)) == []
    assert [one.ends_run for one in first_ratio_alarms({Measured.first_ratio_gap: 1e-3}, POLICY)] == [True]
    cuda = replace(POLICY, device=Device.cuda)
    assert list(first_ratio_alarms({Measured.first_ratio_gap: 0.05}, cuda)) == []
    assert [one.ends_run for one in first_ratio_alarms({Measured.first_ratio_gap: 0.2}, cuda)] == [False]


@pytest.mark.parametrize(
    ("entropy", "estimate", "num_tokens", "is_wrong"),
    [
        (0.6, 0.7, 100, False),
        (4.1, 0.6, 100, True),  # allowed: 0.1 + 20 / 10 = 2.1
        (0.6, 0.9, 10_000, False),
        (0.6, 0.95, 10_000, True),
        (-0.1, 0.0, 100, True),
        (math.nan, 0.0, 100, True),
        (4.1, 0.6, 0, False),
    ],
)
def test_the_entropy_is_near_its_estimate(
    entropy: float, estimate: float, num_tokens: float, is_wrong: bool
) -> None:
    metrics = {"entropy": entropy, "approx_entropy": estimate}
    assert bool(list(entropy_alarms(metrics, num_tokens))) is is_wrong


SCHEDULE = SchedulerConfig(warmup_updates=4, decay_style=LRDecayStyle.linear, decay_updates=14, min_lr=0.1)


def test_the_rate_rises_and_falls_as_configured() -> None:
    assert [scheduled_rate(update, 1.0, SCHEDULE) for update in (1, 4, 9, 14, 99)] == pytest.approx(
        [0.25, 1.0, 0.55, 0.1, 0.1]
    )
    cosine = replace(SCHEDULE, decay_style=LRDecayStyle.cosine)
    assert scheduled_rate(9, 1.0, cosine) == pytest.approx(0.55)
    assert scheduled_rates(5, 2, 1.0, SCHEDULE) == pytest.approx(
        scheduled_rate(4, 1.0, SCHEDULE) + scheduled_rate(5, 1.0, SCHEDULE)
    )
    assert scheduled_rate(99, 1.0, replace(SCHEDULE, decay_style=LRDecayStyle.constant)) == 1.0


@pytest.mark.parametrize("style", LRDecayStyle)
@pytest.mark.parametrize(("warmup", "end"), [(0, 10), (4, 14), (5, 5), (7, 3)])
def test_it_is_trainings_own_schedule(style: LRDecayStyle, warmup: int, end: int) -> None:
    cfg = SchedulerConfig(warmup_updates=warmup, decay_style=style, decay_updates=end, min_lr=0.1)
    for update in range(1, 20):
        assert scheduled_rate(update, 1.0, cfg) == pytest.approx(learning_rate(update, 1.0, cfg))


def optimizer(policy: PolicyConfig = POLICY, before: float | None = 8.0, **changes: Any) -> list[str]:
    """What is said of the demo's second step: 16 of the warm-up's 40 updates are done."""
    measured = {
        Measured.num_updates: 16.0,
        Measured.optimizer_step_gap: 0.0,
        Measured.learning_rate: 1e-3 * 16 / 40,
        Measured.moment_excess: 0.0,
        **changes,
    }
    return [alarm.tripwire for alarm in optimizer_alarms(measured, policy, before, planned=8)]


def test_a_healthy_step_trips_nothing() -> None:
    assert optimizer() == []
    assert optimizer(before=None) == []
    assert list(optimizer_alarms({}, POLICY, None, planned=8)) == []


def test_a_step_whose_updates_were_all_skipped_has_no_rate_to_judge() -> None:
    measured = {Measured.num_updates: 0.0, Measured.learning_rate: POLICY.optimizer.lr}
    assert list(optimizer_alarms(measured, POLICY, None, planned=0)) == []
    assert [one.tripwire for one in optimizer_alarms(measured, POLICY, None, planned=1)] == ["learning_rate"]


def test_more_skipped_updates_in_a_row_than_are_allowed_are_an_alarm() -> None:
    limit = POLICY.loss_scaling.max_skipped_updates
    assert list(skipped_alarms({}, POLICY)) == []
    assert list(skipped_alarms({"skipped_in_a_row": limit, "loss_scale": 1.0}, POLICY)) == []
    (alarm,) = skipped_alarms({"skipped_in_a_row": limit + 1.0, "loss_scale": 1.0}, POLICY)
    assert alarm.wrong == (
        "the last 21 updates were skipped, since their gradients overflowed float16, over "
        "policy.loss_scaling.max_skipped_updates=20; the loss's scale is 1"
    )
    assert "policy.precision=bfloat16" in alarm.look_at


def test_updates_are_those_planned_and_the_optimizer_counts_them_too() -> None:
    assert optimizer(before=9.0) == ["update_count"]
    assert optimizer(optimizer_step_gap=8.0) == ["update_count"]


def test_the_learning_rate_is_the_schedules() -> None:
    assert optimizer(learning_rate=1e-3 * 15 / 40) == ["learning_rate"]
    assert optimizer(learning_rate=math.nan) == ["learning_rate"]


def test_all_groups_of_the_optimizer_have_one_learning_rate_and_the_weight_decay_is_the_keys() -> None:
    decay = POLICY.optimizer.weight_decay
    healthy = {Measured.learning_rate_spread: 0.0, Measured.weight_decay: decay}
    assert list(group_setting_alarms(healthy, POLICY)) == list(group_setting_alarms({}, POLICY)) == []
    for wrong, tripwire in (
        ({Measured.learning_rate_spread: 1e-5}, "learning_rate"),
        ({Measured.weight_decay: decay + 0.01}, "weight_decay"),
    ):
        assert [one.tripwire for one in group_setting_alarms(healthy | wrong, POLICY)] == [tripwire]


def test_before_the_first_update_the_reference_is_the_policy() -> None:
    near, far = {Measured.reference_gap: 1e-6}, {Measured.reference_gap: 1e-2}
    assert list(first_reference_alarms(near, POLICY)) == list(first_reference_alarms({}, POLICY)) == []
    (alarm,) = first_reference_alarms(far, POLICY)
    assert (alarm.tripwire, alarm.ends_run) == ("first_reference", True)
    begun = replace(POLICY, lora=replace(POLICY.lora, enabled=True, adapter_path="adapters"))
    assert list(first_reference_alarms(far, begun)) == []
    replaying = replace(POLICY, megatron_cfg=replace(POLICY.megatron_cfg, router_replay=True))
    assert list(first_reference_alarms(far, replaying)) == []


def test_clipped_gradients_make_no_long_moment() -> None:
    assert optimizer(moment_excess=1e-4) == []
    assert optimizer(moment_excess=0.3) == ["gradient_clipping"]


def test_an_alarm_on_long_means_names_those_of_the_optimizer() -> None:
    cfg = replace(POLICY, optimizer=replace(POLICY.optimizer, kind=OptimizerKind.muon))
    for group, name in ((POLICY, "Adam's first moment is 0.3"), (cfg, "Muon's momentum, or Adam's first")):
        measured = {Measured.num_updates: 0.0, Measured.learning_rate: 0.0, Measured.moment_excess: 0.3}
        (alarm,) = optimizer_alarms(measured, group, None, planned=0)
        assert alarm.wrong.startswith(name)


def test_what_is_no_number_is_named() -> None:
    assert list(finite_alarms({"loss": 1.0})) == []
    (alarm,) = finite_alarms({"loss": math.nan, "grad_norm": math.inf, "lr": 0.0})
    assert alarm.wrong == "not finite: grad_norm, loss"
