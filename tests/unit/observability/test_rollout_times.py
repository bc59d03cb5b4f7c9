"""The file with the times of rollouts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from nemo_like.observability.rollout_times import (
    RolloutTimes,
    SampleTimes,
    TurnTimes,
    append_rollout_times,
    read_rollout_times,
)

ROLLOUT = RolloutTimes(
    step=2,
    first_group=0,
    began_s=1700000000.125,
    groups=(
        (
            SampleTimes(19, (TurnTimes(0.0, 4, 0.25, 1.5), TurnTimes(1.5, 3, 2.0, 2.125))),
            SampleTimes(12, (TurnTimes(0.0, 4, 0.25, 0.5),)),
        ),
    ),
)


def test_a_rollout_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "rollout_times.jsonl"
    append_rollout_times(path, ROLLOUT)
    append_rollout_times(path, replace(ROLLOUT, step=1))
    assert read_rollout_times(path) == [replace(ROLLOUT, step=1), ROLLOUT]
    first = path.read_text().splitlines()[0]
    assert '"groups":[[[19,[0,4,250,1500],[1500,3,2000,2125]],[12,[0,4,250,500]]]]' in first


def test_a_step_that_was_made_again_has_its_last_times(tmp_path: Path) -> None:
    path = tmp_path / "rollout_times.jsonl"
    again = replace(ROLLOUT, began_s=1700000001.5)
    for one in (ROLLOUT, replace(ROLLOUT, first_group=8), again):
        append_rollout_times(path, one)
    assert read_rollout_times(path) == [again, replace(ROLLOUT, first_group=8)]


def test_a_line_that_was_cut_short_is_left_out_and_another_format_refused(tmp_path: Path) -> None:
    path = tmp_path / "rollout_times.jsonl"
    append_rollout_times(path, ROLLOUT)
    with path.open("a") as file:
        file.write('{"step": 3, "first_')
    assert read_rollout_times(path) == [ROLLOUT]
    path.write_text('{"step": 3}\n')
    with pytest.raises(ValueError, match=r"rollout_times\.jsonl:1 is no line of rollout times"):
        read_rollout_times(path)


def test_single_lines_of_anything_else_are_left_out_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "rollout_times.jsonl"
    append_rollout_times(path, ROLLOUT)
    path.write_bytes(b'{"step": 3, "first_' + path.read_bytes() + b"\xff\n" + path.read_bytes())
    told: list[str] = []
    assert read_rollout_times(path, told.append) == [ROLLOUT]
    assert told == [f"{path}:1 is no line of rollout times, and 1 more are none; left out"]
