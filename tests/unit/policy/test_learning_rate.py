from __future__ import annotations

import pytest

from nemo_like.policy.backends.learning_rate import learning_rate
from nemo_like.policy.options import LRDecayStyle, SchedulerConfig


def schedule(style: LRDecayStyle, *, warmup: int = 4, decay: int = 12) -> SchedulerConfig:
    return SchedulerConfig(warmup_updates=warmup, decay_style=style, decay_updates=decay, min_lr=0.1)


@pytest.mark.parametrize("style", list(LRDecayStyle))
def test_warm_up_rises_evenly_to_the_peak(style: LRDecayStyle) -> None:
    rates = [learning_rate(update, 1.0, schedule(style)) for update in (1, 2, 3, 4)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0])


@pytest.mark.parametrize(
    ("style", "half_way", "at_the_end"),
    [
        (LRDecayStyle.constant, 1.0, 1.0),
        (LRDecayStyle.linear, 0.1 + 0.9 / 2, 0.1),
        (LRDecayStyle.cosine, 0.1 + 0.9 / 2, 0.1),
    ],
)
def test_decay_reaches_the_minimum_at_its_last_update_and_stays(
    style: LRDecayStyle, half_way: float, at_the_end: float
) -> None:
    assert learning_rate(8, 1.0, schedule(style)) == pytest.approx(half_way)
    assert learning_rate(12, 1.0, schedule(style)) == pytest.approx(at_the_end)
    assert learning_rate(50, 1.0, schedule(style)) == pytest.approx(at_the_end)


def test_cosine_decay_is_slow_at_first() -> None:
    # A quarter of the way: (1 + cos 45 deg) / 2 = 0.8536 of the range is left.
    rate = learning_rate(6, 1.0, schedule(LRDecayStyle.cosine))
    assert rate == pytest.approx(0.1 + 0.9 * 0.853553, abs=1e-6)


def test_without_warm_up_the_first_update_is_one_step_down_from_the_peak() -> None:
    rate = learning_rate(1, 1.0, schedule(LRDecayStyle.linear, warmup=0, decay=10))
    assert rate == pytest.approx(0.1 + 0.9 * 0.9)


def test_a_decay_that_ends_with_the_warm_up_leaves_the_minimum() -> None:
    assert learning_rate(5, 1.0, schedule(LRDecayStyle.linear, warmup=4, decay=4)) == pytest.approx(0.1)
