"""Sizes at which a benchmark has nothing to measure are refused, before it starts anything."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.unit.documented import ROOT


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("overlap.py journal --steps 4", "argument --steps: 4 is too few; the least is 5"),
        ("tripwires.py cost --steps 10", "argument --steps: 10 is too few; the least is 11"),
        ("long_run.py --steps 49", "--steps 49 is too few for two looks; the least is 50"),
        ("end_to_end.py --steps 1", "argument --steps: 1 is too few; the least is 2"),
        ("against_others.py --steps 1", "argument --steps: 1 is too few; the least is 2"),
    ],
)
def test_too_few_steps_are_refused_with_the_least_that_there_may_be(command: str, said: str) -> None:
    script, *arguments = command.split()
    program = [sys.executable, f"scripts/bench/{script}", *arguments]
    done = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert done.stderr.endswith(f": error: {said}\n")
