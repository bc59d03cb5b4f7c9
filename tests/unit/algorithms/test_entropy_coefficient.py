"""A coefficient that holds the entropy at a target, step by step."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nemo_like.algorithms.entropy_coefficient import COEFFICIENT, ENTROPY, EntropyCoefficient
from tests.unit.algorithms.loss_cases import CONFIG

TARGET = replace(
    CONFIG, entropy_coef=0.01, entropy_target=0.5, entropy_coef_delta=0.02, entropy_coef_max=0.04
)


def test_it_grows_below_the_target_and_shrinks_above_it_within_its_bounds() -> None:
    coefficient = EntropyCoefficient.at_start(TARGET, {})
    assert coefficient is not None
    values, factors = [coefficient.value], [coefficient.of_step(TARGET)]
    for entropy in (0.4, 0.3, 0.6, 0.7, 0.8, 0.1):
        coefficient = coefficient.after({ENTROPY: entropy}, TARGET)
        values.append(coefficient.value)
        factors.append(coefficient.of_step(TARGET))
    assert values == pytest.approx([0.01, 0.03, 0.04, 0.02, 0.0, 0.0, 0.02])
    # No bonus after a step above the target.
    assert factors == pytest.approx([0.01, 0.03, 0.04, 0.0, 0.0, 0.0, 0.02])


def test_a_resumed_run_goes_on_with_the_coefficient_of_its_latest_step() -> None:
    first = EntropyCoefficient.at_start(TARGET, {})
    assert first is not None
    metrics = {ENTROPY: 0.4, COEFFICIENT: first.value}
    assert EntropyCoefficient.at_start(TARGET, metrics) == first.after(metrics, TARGET)


def test_a_step_that_does_not_train_leaves_it() -> None:
    coefficient = EntropyCoefficient(0.03, 0.4)
    assert coefficient.after({}, TARGET) == coefficient


def test_without_a_target_there_is_none() -> None:
    assert EntropyCoefficient.at_start(replace(CONFIG, entropy_coef=0.01), {}) is None
