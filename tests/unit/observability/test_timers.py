from __future__ import annotations

import pytest

from nemo_like.observability.timers import SlowestPass, StageTimer


class Clock:
    """Advances only when told to."""

    def __init__(self):
        self.now_s = 100.0

    def __call__(self):
        return self.now_s


def test_stages_are_reported_under_the_prefix_in_seconds():
    clock = Clock()
    timer = StageTimer(clock)
    with timer("generation"):
        clock.now_s += 1.5
    with timer("logprobs"):
        clock.now_s += 0.25
    assert timer.metrics() == {"timing/train/generation": 1.5, "timing/train/logprobs": 0.25}
    assert timer.metrics("timing/validation/")["timing/validation/generation"] == 1.5


def test_a_stage_entered_twice_adds_up():
    clock = Clock()
    timer = StageTimer(clock)
    for seconds in (1.0, 2.0):
        with timer("weight_sync"):
            clock.now_s += seconds
    assert timer.metrics() == {"timing/train/weight_sync": 3.0}


def test_an_outer_stage_contains_the_inner_ones():
    clock = Clock()
    timer = StageTimer(clock)
    with timer("total_step_time"):
        clock.now_s += 1.0
        with timer("generation"):
            clock.now_s += 2.0
    assert timer.metrics() == {"timing/train/generation": 2.0, "timing/train/total_step_time": 3.0}


def test_a_stage_that_raises_is_timed_too():
    clock = Clock()
    timer = StageTimer(clock)
    with pytest.raises(RuntimeError, match="broken"), timer("generation"):
        clock.now_s += 2.0
        raise RuntimeError("broken")
    assert timer.metrics() == {"timing/train/generation": 2.0}


def test_time_measured_elsewhere_can_be_added():
    timer = StageTimer(Clock())
    timer.add("reward", 0.5)
    timer.add("reward", 0.25)
    assert timer.metrics() == {"timing/train/reward": 0.75}


def test_the_slowest_pass_counts():
    clock = Clock()
    timer = SlowestPass(clock)
    assert timer.slowest_s == 0.0
    for seconds in (2.0, 5.0, 1.0):
        with timer:
            clock.now_s += seconds
    assert timer.slowest_s == 5.0
