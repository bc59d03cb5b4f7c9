"""scripts/bench/against_others.py: its medians, ratios and tables, and what it says where TRL is missing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from scripts.bench.others.differences import differences
from scripts.bench.others.sides import trl_problem
from scripts.bench.others.summary import markdown, step_s, summary, time_over, tokens_per_s
from scripts.bench.others.turns import Turn
from tests.unit.documented import ROOT

SLOW = Turn(ends_s=(9.0, 11.0, 14.0), new_tokens=(1000, 100, 150), cpu_s=9.0, accuracy=0.4)
FAST = Turn(ends_s=(1.0, 2.0, 3.0), new_tokens=(1000, 90, 110), cpu_s=3.0, accuracy=0.8)
PLAIN = Turn(ends_s=(1.0, 3.0, 5.0), new_tokens=(7, 100, 100))


def test_the_first_step_of_a_turn_is_not_counted() -> None:
    assert tokens_per_s(SLOW) == 250 / 5
    assert step_s([SLOW, FAST]) == 1.5  # of 2, 3, 1 and 1 seconds


def test_a_side_that_learns_has_the_seconds_to_the_goal_by_its_median_step() -> None:
    found = summary([SLOW, FAST], goal=0.7)
    assert (found["step_s"], found["new_tokens_per_step"], found["new_tokens_per_s"]) == (1.5, 105, 75.0)
    assert found["cpu_s_per_step"] == 2.0  # the median of 3 and 1
    assert found["s_to_goal"] == 9.0  # 6 steps
    assert found["accuracies"] == [
        {"step": 3, "s": 4.5, "accuracy": 0.4},
        {"step": 6, "s": 9.0, "accuracy": 0.8},
    ]
    assert summary([SLOW, FAST], goal=0.9)["s_to_goal"] is None
    assert "accuracies" not in summary([PLAIN], goal=0.7)


def test_a_side_is_compared_with_the_fastest_of_the_others_round_by_round() -> None:
    turns = {"ours": [FAST, FAST, FAST], "a": [SLOW, PLAIN, PLAIN], "b": [SLOW, SLOW, PLAIN]}
    # FAST has 100 tokens/s; of the others a has a median of 50, as b has.
    assert time_over(turns, "ours", ["a", "missing"]) == {
        "of": "a",
        "median": 0.5,
        "least": 0.5,
        "greatest": 0.5,
    }
    assert time_over({**turns, "b": [FAST, FAST, SLOW]}, "ours", ["a", "b"]) == {
        "of": "b",
        "median": 1.0,
        "least": 0.5,
        "greatest": 1.0,
    }
    assert time_over(turns, "ours", ["missing"]) is None


def test_a_table_leaves_open_what_was_not_reached() -> None:
    sides = {
        "ours": {
            "step_s": 1.234,
            "cpu_s_per_step": 2.5,
            "new_tokens_per_s": 4321.0,
            "s_to_goal": 80.4,
            "peak_mib": 2048.0,
        },
        "bare": {"step_s": 1.0, "cpu_s_per_step": 0.25, "new_tokens_per_s": 900.0, "peak_mib": 512.0},
    }
    rows = markdown({"sides": sides}, {"ours": "this", "bare": "alone"}).splitlines()
    assert rows[2:] == ["| this | 1.23 | 2.50 | 4,321 | 80 | 2.0 |", "| alone | 1.00 | 0.25 | 900 |  | 0.5 |"]


def test_what_is_not_equal_is_told_of_the_sides_that_ran() -> None:
    def mentions(sides: list[str], word: str) -> bool:
        return any(word in text for text in differences(sides))

    assert mentions(["synchronous", "trl_vllm"], "learning rate") and not mentions(
        ["synchronous"], "TRL lowers"
    )
    assert mentions(["ahead"], "One version ahead") and not mentions(["trl"], "One version ahead")


def test_where_trl_is_missing_its_sides_are_refused_with_the_command(tmp_path: Path) -> None:
    assert trl_problem(["synchronous", "bare"], None) is None
    (tmp_path / "trl").mkdir()
    assert trl_problem(["trl"], tmp_path) is None
    program = [sys.executable, "scripts/bench/against_others.py", "--trl", str(tmp_path / "none")]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert "trl and trl_vllm need TRL" in done.stderr
    assert f"`python -m pip install --no-deps --target {tmp_path / 'none'} trl`" in done.stderr
