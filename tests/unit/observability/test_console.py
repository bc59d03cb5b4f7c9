from __future__ import annotations

import io
import math
from pathlib import Path

import pytest

from nemo_like.observability.console import PlainConsole, make_console
from nemo_like.observability.live_console import LiveConsole
from nemo_like.observability.options import ConsoleMode
from nemo_like.observability.progress import RunProgress
from nemo_like.observability.run_panel import sparkline

STEP = {
    "train/reward": 0.5,
    "train/loss": -0.00125,
    "train/grad_norm": 1.25,
    "train/token_mult_prob_error": 1.00001,
    "performance/tokens_per_sec": 9876.4,
    "timing/train/total_step_time": 0.8,
    "timing/train/generation": 0.2,
    "timing/train/policy_training": 0.4,
}


class TerminalStream(io.StringIO):
    def isatty(self):
        return True


class Clock:
    def __init__(self):
        self.now_s = 0.0

    def __call__(self):
        return self.now_s


def test_plain_lines_are_exactly_these():
    clock, stream = Clock(), io.StringIO()
    console = PlainConsole(stream, RunProgress(max_num_steps=80, clock=clock))
    console.status("starting engines")
    clock.now_s = 65.0
    console.status("connecting")
    console.validation(0, {"validation/accuracy": 0.25})
    console.step(1, STEP)
    console.validation(1, {"validation/accuracy": 0.375, "validation/reward": 0.5})
    console.note("warning: mind the gap")
    console.close()
    assert stream.getvalue().splitlines() == [
        "[0:00] starting engines",
        "[1:05] connecting",
        "step 0/80  validation accuracy 0.250",
        "step 1/80  reward 0.500  loss -0.0013  grad_norm 1.250  tokens/s 9876  step time 0.80 s "
        "(generation 25%, policy_training 50%, other 25%)  eta 1:03",
        "step 1/80  validation accuracy 0.375  validation reward 0.500",
        "warning: mind the gap",
    ]


def test_a_step_without_timings_shows_what_there_is():
    stream = io.StringIO()
    PlainConsole(stream, RunProgress(max_num_steps=3, clock=Clock())).step(2, {"train/reward": 1.0})
    assert stream.getvalue() == "step 2/3  reward 1.000\n"


OWN = {
    "train/reward": 0.35,
    "train/env/math/reward": 0.35,
    "train/env/math/reward/format": 0.1,
    "train/env/math/reward/right": 0.25,
    "train/env/math/inner/reward/score": 9.0,  # a metric of the environment's own
    "train/mean_gen_tokens_per_sample": 57.31,
    "train/truncation_rate": 0.125,
    "train/loss": 0.5,
}


def line_of(metrics):
    stream = io.StringIO()
    PlainConsole(stream, RunProgress(max_num_steps=3, clock=Clock())).step(2, metrics)
    return stream.getvalue().removeprefix("step 2/3  ").rstrip("\n")


def test_a_line_has_the_rewards_components_the_length_and_the_truncated_responses():
    assert line_of(OWN) == (
        "reward 0.350 (format 0.100, right 0.250)  length 57.3  truncated 12.5%  loss 0.5000"
    )


def test_a_reward_of_one_component_is_shown_once():
    assert line_of({"train/reward": 0.5, "train/env/sums/reward/exact_match": 0.5}) == "reward 0.500"


def test_components_of_several_environments_are_told_apart():
    several = {
        **OWN,
        "train/env/code/reward/passed": 0.5,
        "train/env/math/reward/style": 0.0,
    }
    assert line_of(several).startswith(
        "reward 0.350 (math/format 0.100, math/right 0.250, math/style 0.000, code 0.500)  length"
    )


def test_a_line_has_at_most_eight_components():
    many = {f"train/env/math/reward/part_{number}": 0.0 for number in range(11)}
    assert line_of({"train/reward": 0.0, **many}).endswith("part_7 0.000, 3 more)")


def test_auto_is_plain_away_from_a_terminal_and_live_on_one():
    progress = RunProgress(max_num_steps=1)
    assert isinstance(make_console(ConsoleMode.auto, io.StringIO(), "run", progress), PlainConsole)
    live = make_console(ConsoleMode.auto, TerminalStream(), "run", progress)
    live.close()
    assert isinstance(live, LiveConsole)


def test_plain_can_be_asked_for_on_a_terminal():
    console = make_console(ConsoleMode.plain, TerminalStream(), "run", RunProgress(max_num_steps=1))
    assert isinstance(console, PlainConsole)


@pytest.fixture
def wide_terminal(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm-256color")


def test_the_live_view_shows_step_reward_accuracy_speed_stages_and_time_left(wide_terminal):
    stream = TerminalStream()
    console = LiveConsole(stream, "my-run", RunProgress(max_num_steps=80, clock=Clock()))
    console.status("starting engines")
    console.validation(0, {"validation/accuracy": 0.25})
    console.step(1, STEP)
    console.note("a line that stays")
    console.close()
    shown = stream.getvalue()
    for expected in (
        "my-run", "step 1/80", "eta 1:03", "0.500", "validation accuracy", "0.250 at the start",
        "9,876", "generation 25%", "policy_training 50%", "token_mult_prob_error 1.0000", "a line that stays",
    ):  # fmt: skip
        assert expected in shown


def test_the_live_view_shows_components_length_and_truncated_responses(wide_terminal):
    stream = TerminalStream()
    console = LiveConsole(stream, "my-run", RunProgress(max_num_steps=80, clock=Clock()))
    console.step(1, OWN)
    console.close()
    for expected in ("format 0.100, right 0.250", "response length", "57.3", "12.5% truncated"):
        assert expected in stream.getvalue()


def test_closing_the_live_view_shows_the_cursor_again(wide_terminal):
    stream = TerminalStream()
    console = LiveConsole(stream, "my-run", RunProgress(max_num_steps=1))
    console.close()
    console.close()
    hide, show = "\x1b[?25l", "\x1b[?25h"
    assert hide in stream.getvalue()
    assert stream.getvalue().rindex(show) > stream.getvalue().rindex(hide)


def test_text_in_brackets_is_not_taken_for_markup(wide_terminal):
    stream = TerminalStream()
    console = LiveConsole(stream, "my-run", RunProgress(max_num_steps=1))
    console.note("path [bold] of 3")
    console.close()
    assert "path [bold] of 3" in stream.getvalue()


@pytest.mark.parametrize(
    ("values", "width", "expected"),
    [
        ([], 10, ""),
        ([0.5, 0.5], 10, "▁▁"),
        ([0.0, 1.0], 10, "▁█"),
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, "▁▂▃▄▅▆▇█"),
        ([0, 0, 8, 8], 2, "▁█"),
        ([0.0, math.nan, 1.0, math.inf], 10, "▁█"),
    ],
)
def test_sparklines_go_from_the_lowest_to_the_highest(values, width, expected):
    assert sparkline(values, width) == expected


def test_lines_that_standard_output_cannot_take_go_to_standard_error(capsys):
    with Path("/dev/full").open("w") as stream:
        console = PlainConsole(stream, RunProgress(2))
        console.note("step 1")
        console.note("step 2")
        console.close()
    assert capsys.readouterr().err == "step 1\nstep 2\n"
