"""What each number of gradients, updates and restored state says, and the names that it comes with."""

from __future__ import annotations

from pathlib import Path

import pytest

from nemo_like.configuration import load_config
from nemo_like.tripwires.measured import Measured
from nemo_like.tripwires.optimizer_checks import (
    copy_alarms,
    gradient_alarms,
    restored_alarms,
    setting_alarms,
    update_alarms,
    value_alarms,
)

ROOT = Path(__file__).resolve().parents[3]
POLICY = load_config(ROOT / "configs/grpo_arithmetic_cpu.yaml").policy


def test_nothing_measured_is_no_alarm() -> None:
    assert not [*gradient_alarms({}, (), 1.0), *update_alarms({}, ()), *restored_alarms({}, ())]
    assert not [*setting_alarms({}, POLICY), *copy_alarms({}, (), POLICY), *value_alarms({}, POLICY)]


def test_a_held_gradient_and_still_tensors_are_told() -> None:
    named = ("a.weight (no gradient)", "b.weight (update)")
    measured = {Measured.held_gradient: 0.5, Measured.num_still_tensors: 1.0}
    held, still = gradient_alarms(measured, named, 1.0)
    assert (held.tripwire, still.tripwire) == ("gradients_cleared", "still_tensors")
    assert "norm 0.5" in held.wrong
    assert still.wrong.endswith(": a.weight")


def test_a_gradient_that_does_not_reach_the_embedding_is_told() -> None:
    lost = {Measured.num_first_layers: 1.0, Measured.first_layer_gradient: 0.0, Measured.num_updates: 2.0}
    (alarm,) = gradient_alarms(lost, (), 0.5)
    assert alarm.tripwire == "still_tensors"
    assert not [*gradient_alarms(lost, (), 0.0)]  # all advantages are 0
    assert not [*gradient_alarms(lost, (), None)]  # float16 skipped every update
    assert not [*gradient_alarms({**lost, Measured.first_layer_gradient: 1e-9}, (), 0.5)]
    assert not [*gradient_alarms({**lost, Measured.num_first_layers: 0.0}, (), 0.5)]  # frozen
    assert not [*gradient_alarms({**lost, Measured.num_updates: 1.0}, (), 0.5)]  # a critic's first


def test_a_loss_whose_gradient_reaches_no_weight_is_told() -> None:
    lost = {Measured.loss_gradient: 0.01}
    (alarm,) = gradient_alarms(lost, (), 0.0)
    assert alarm.tripwire == "still_tensors"
    assert "up to 0.01" in alarm.wrong
    assert not [*gradient_alarms({Measured.loss_gradient: 0.0}, (), 0.0), *gradient_alarms(lost, (), 0.5)]


@pytest.mark.parametrize(
    ("name", "rounding", "gap", "text"),
    [
        (Measured.betas_gap, 1e-8, 0.09, "betas are 0.09 from policy.optimizer's (0.9, 0.99)"),
        (Measured.eps_gap, 1e-17, 1.0, "eps is 1 from policy.optimizer's 1e-08"),
        (Measured.weight_decay_gap, 0.0, 0.01, "weight decay is 0.01 from policy.optimizer's 0 or 0"),
    ],
)
def test_settings_may_be_rounded_to_float32(name: Measured, rounding: float, gap: float, text: str) -> None:
    assert not [*setting_alarms({name: rounding}, POLICY)]
    (alarm,) = setting_alarms({name: gap}, POLICY)
    assert alarm.tripwire == "optimizer_settings"
    assert text in alarm.wrong


def test_an_update_beyond_its_rounding_names_the_tensors() -> None:
    assert not [*update_alarms({Measured.update_excess: 1.0}, ())]
    measured = {Measured.update_excess: 40.0, Measured.num_wrong_updates: 2.0}
    (alarm,) = update_alarms(measured, ("a (update)", "b (update)"))
    assert alarm.tripwire == "update_formula"
    assert "2 tensors" in alarm.wrong
    assert alarm.wrong.endswith("by up to 40 times what rounding allows: a, b")


def test_unequal_copies_and_restored_state_are_told() -> None:
    (copies,) = copy_alarms({Measured.num_unequal_copies: 1.0}, ("a (unequal copies)",), POLICY)
    assert copies.tripwire == "equal_copies"
    weights, moments = restored_alarms(
        {Measured.num_unlike_saved: 1.0, Measured.num_unlike_moments: 3.0}, ("a (restored)",)
    )
    assert weights.tripwire == moments.tripwire == "restored_state"
    assert "1 weights" in weights.wrong
    assert "3 moments" in moments.wrong


def test_a_critics_estimates_and_first_values_have_the_limits_of_float32() -> None:
    fine = {Measured.advantage_error: 2e-7, Measured.return_error: 2e-7, Measured.first_value_gap: 1e-4}
    assert not [*value_alarms(fine, POLICY)]
    wrong = {Measured.advantage_error: 0.1, Measured.return_error: 1e-5, Measured.first_value_gap: 0.1}
    assert [alarm.tripwire for alarm in value_alarms(wrong, POLICY)] == ["gae", "gae", "first_values"]
