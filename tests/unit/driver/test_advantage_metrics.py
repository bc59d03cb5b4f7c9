"""What train/advantages/* say where the tokens of a sample have advantages of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nemo_like.driver.reports import train_report
from tests.unit.driver.test_step_checks import HEALTHY


def reported(**tags: tuple[float, ...]) -> dict[str, float]:
    """Of four samples with 3, 4, 2 and 2 response tokens, of which the third does not train."""
    results = HEALTHY.results()
    batch = results.batch.with_tags({"policy_version": (1,) * 4, "sample_mask": (1.0, 1.0, 0.0, 1.0), **tags})
    metrics = train_report(replace(results, batch=batch), {"timing/train/total_step_time": 1.0}).metrics
    return {name: metrics[f"train/advantages/{name}"] for name in ("mean", "max", "min")}


def test_with_a_critic_a_sample_s_advantage_is_the_mean_over_its_tokens() -> None:
    found = reported(
        advantage=(0.1, 0.1, 0.0, 0.1),
        token_scale=(0.5, 0.5, 0.5, 0.5),
        token_advantage_sum=(2.0, -3.0, 9.0, 8.0),
    )
    means = (0.1 + 0.5 * 2 / 3, 0.1 - 0.5 * 3 / 4, 0.1 + 0.5 * 8 / 2)
    assert found == pytest.approx({"mean": sum(means) / 3, "max": means[2], "min": means[1]})


def test_without_one_it_is_that_of_its_tokens() -> None:
    found = reported(advantage=(0.5, -2.0, 7.0, 1.0))
    assert found == pytest.approx({"mean": -0.5 / 3, "max": 1.0, "min": -2.0})
