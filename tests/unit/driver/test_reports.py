"""The metrics of a critic."""

from __future__ import annotations

import pytest

from nemo_like.batch.meta import Chunk, KVBatchMeta
from nemo_like.driver.reports import CriticStep, critic_metrics
from nemo_like.observability.metrics import mean
from nemo_like.policy.results import ScoredBatch, TrainUpdate

BATCH = KVBatchMeta("train-1", (Chunk("a", (4, 4)),), ((0, 0), (0, 1)), frozenset())


def critic(returns: list[float], values: list[float]) -> CriticStep:
    """A step whose tokens have these returns, and had these values before its updates."""
    left = [own - value for own, value in zip(returns, values, strict=True)]
    sums = {
        "returns": sum(returns),
        "square_returns": sum(own * own for own in returns),
        "advantages": sum(left),
        "square_advantages": sum(own * own for own in left),
    }
    fit = {name: mean(total, len(returns)) for name, total in sums.items()}
    update = TrainUpdate({"loss": mean(0.5)}, version=1, compute_s=1.0, operations=())
    return CriticStep(ScoredBatch(BATCH, fit), update)


@pytest.mark.parametrize(
    ("values", "explained"),
    [
        ([1.0, 2.0, 3.0, 6.0], 1.0),
        ([3.0, 3.0, 3.0, 3.0], 0.0),
        # As far off everywhere: nothing but a shift is left open.
        ([0.0, 1.0, 2.0, 5.0], 1.0),
        # Returns vary by 14 / 4, and what is left, 0 0 -1 1, by 2 / 4.
        ([1.0, 2.0, 4.0, 5.0], 1 - 2 / 14),
        # Worse than a constant: what is left is -5 -1 1 5.
        ([6.0, 3.0, 2.0, 1.0], 1 - 52 / 14),
    ],
)
def test_explained_variance_is_what_the_values_say_of_the_returns(
    values: list[float], explained: float
) -> None:
    found = critic_metrics(critic([1.0, 2.0, 3.0, 6.0], values))
    assert found == pytest.approx(
        {"train/value/loss": 0.5, "train/value/returns": 3.0, "train/value/explained_variance": explained}
    )


@pytest.mark.parametrize("equal", [0.0, 0.1, 1 / 3, -1e3])
def test_equal_returns_have_no_variance_to_explain(equal: float) -> None:
    found = critic_metrics(critic([equal] * 7, [equal - 0.2] * 7))
    assert found == pytest.approx({"train/value/loss": 0.5, "train/value/returns": equal})


def test_without_samples_that_train_there_is_no_fit_and_without_a_critic_nothing() -> None:
    step = critic([1.0], [1.0])
    unfitted = CriticStep(ScoredBatch(BATCH), step.update)
    assert critic_metrics(unfitted) == {"train/value/loss": 0.5}
    assert critic_metrics(None) == {}
