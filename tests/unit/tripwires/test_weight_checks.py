from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nemo_like.configuration import load_config
from nemo_like.policy.options import OptimizerKind, PolicyConfig, Precision
from nemo_like.tripwires.measured import Measured
from nemo_like.tripwires.weight_checks import change_alarms, digest_alarms, largest_change, weight_alarms

POLICY = load_config(Path(__file__).resolve().parents[3] / "configs/grpo_arithmetic_cpu.yaml").policy


def digests(low: int, high: int) -> dict[str, float]:
    return {Measured.engine_digest_min: float(low), Measured.engine_digest_max: float(high)}


def test_engines_sample_with_what_was_sent() -> None:
    assert list(digest_alarms(digests(255, 255), [255.0])) == []
    (alarm,) = digest_alarms(digests(16, 255), [255.0])
    assert "digest ff, and engines sampled with 10 and ff" in alarm.wrong
    assert len(list(digest_alarms(digests(16, 16), [255.0]))) == 1


def test_a_rollout_that_ran_ahead_may_have_been_sampled_with_several_versions() -> None:
    assert list(digest_alarms(digests(16, 255), [16.0, 32.0, 255.0])) == []
    (alarm,) = digest_alarms(digests(17, 255), [16.0, 255.0])
    assert "digest 10 and ff, and engines sampled with 11 and ff" in alarm.wrong


def test_where_there_is_no_digest_nothing_is_judged() -> None:
    assert list(digest_alarms({}, [255.0])) == []
    assert list(digest_alarms(digests(16, 16), [])) == []


@pytest.mark.parametrize(
    ("name", "tripwire"),
    [
        (Measured.weights_moved_elsewhere, "weights_kept"),
        (Measured.reference_moved, "reference_kept"),
        (Measured.has_policy_as_reference, "reference_kept"),
    ],
)
def test_weights_change_in_training_alone(name: Measured, tripwire: str) -> None:
    assert list(weight_alarms({name: 0.0})) == []
    assert [alarm.tripwire for alarm in weight_alarms({name: 1.0})] == [tripwire]


def test_adams_largest_change_is_that_of_cauchy_and_schwarz() -> None:
    # b1 = 0.9, b2 = 0.99: 0.1 / sqrt(0.01 (1 - 0.81 / 0.99)) = 2.345.
    cfg = replace(POLICY.optimizer, adam_beta1=0.9, adam_beta2=0.99, weight_decay=0.5)
    assert largest_change(cfg, 0.002, 10.0) == pytest.approx(1.05 * 0.002 * (2.3452 + 5.0), rel=1e-4)
    assert largest_change(replace(cfg, adam_beta2=0.8), 0.002, 10.0) is None


def test_muons_largest_change_is_that_of_a_wide_orthogonal_matrix() -> None:
    # 0.2 sqrt(65,536) = 51.2, by at most 1.25.
    cfg = replace(POLICY.optimizer, kind=OptimizerKind.muon, weight_decay=0.5)
    assert largest_change(cfg, 0.002, 10.0) == pytest.approx(1.05 * 0.002 * (64.0 + 5.0))


def changed(
    moved: float, cfg: PolicyConfig = POLICY, *, rates: float = 0.008, norm: float = 1.0
) -> list[bool]:
    measured = {Measured.weights_moved: moved, Measured.largest_weight: 1.0}
    alarms = change_alarms(measured, cfg, learning_rates=rates, gradient_norm=norm)
    return [alarm.ends_run for alarm in alarms]


def test_an_update_changes_weights_and_by_no_more_than_adam_can() -> None:
    assert changed(0.005) == []
    assert changed(0.0) == [True]
    assert changed(0.03) == [True]
    assert changed(float("nan")) == [True]


def test_an_alarm_names_the_optimizer_that_cannot_have_changed_a_weight_so() -> None:
    cfg = replace(POLICY, optimizer=replace(POLICY.optimizer, kind=OptimizerKind.muon))
    assert changed(0.3, cfg) == []
    measured = {Measured.weights_moved: 0.9, Measured.largest_weight: 1.0}
    (alarm,) = change_alarms(measured, cfg, learning_rates=0.008, gradient_norm=1.0)
    assert "and Muon allows at most 0.5" in alarm.wrong


def test_without_a_gradient_or_a_learning_rate_nothing_need_change() -> None:
    assert changed(0.0, norm=0.0) == []
    assert changed(0.0, rates=0.0) == []


def test_in_bfloat16_a_small_change_may_be_lost_in_rounding() -> None:
    bfloat16 = replace(POLICY, precision=Precision.bfloat16)
    assert changed(0.0, bfloat16) == [False]
    assert changed(0.027, bfloat16) == []


def test_float16_rounds_less_than_bfloat16() -> None:
    float16 = replace(POLICY, precision=Precision.float16)
    assert changed(0.0, float16) == [False]
    assert changed(0.027, float16) == [True]


def test_what_was_not_measured_is_not_judged() -> None:
    assert list(change_alarms({}, POLICY, learning_rates=1.0, gradient_norm=1.0)) == []
