from __future__ import annotations

import pytest

from nemo_like.observability.progress import RunProgress, StageShare, format_duration, stage_shares


def test_shares_are_of_the_whole_step_and_the_rest_is_other():
    shares = stage_shares(
        {
            "timing/train/total_step_time": 2.0,
            "timing/train/generation": 0.5,
            "timing/train/policy_training": 1.0,
        }
    )
    assert shares == [
        StageShare("generation", 0.25),
        StageShare("policy_training", 0.5),
        StageShare("other", 0.25),
    ]


def test_what_happens_within_another_stage_is_not_counted_twice():
    shares = stage_shares(
        {"timing/train/total_step_time": 1.0, "timing/train/generation": 1.0, "timing/train/reward": 0.5}
    )
    assert shares == [StageShare("generation", 1.0)]


def test_tiny_shares_are_left_out():
    shares = stage_shares(
        {
            "timing/train/total_step_time": 1.0,
            "timing/train/advantage": 0.001,
            "timing/train/generation": 0.999,
        }
    )
    assert [item.stage for item in shares] == ["generation"]


def test_there_are_no_shares_without_timings():
    assert stage_shares({"train/reward": 1.0}) == []


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0:00"), (59.4, "0:59"), (59.6, "1:00"), (125, "2:05"), (3723, "1:02:03")]
)
def test_durations_read_as_on_a_clock(seconds, text):
    assert format_duration(seconds) == text


def test_time_left_follows_the_recent_pace_with_validations_included():
    times_s = iter([0.0, 10.0, 12.0, 16.0])  # start, then the ends of steps 1, 2 and 3
    progress = RunProgress(max_num_steps=10, clock=lambda: next(times_s))
    for step in (1, 2, 3):
        progress.on_step(step, {"train/reward": 0.1 * step})
    # Two intervals in 6 s are 3 s a step; 7 steps are left.
    assert progress.eta_s == 21.0


def test_time_left_after_one_step_is_estimated_from_its_own_duration():
    progress = RunProgress(max_num_steps=5, clock=lambda: 0.0)
    assert progress.eta_s is None
    progress.on_step(1, {"timing/train/total_step_time": 2.5})
    assert progress.eta_s == 10.0
