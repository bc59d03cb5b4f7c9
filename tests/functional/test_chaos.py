"""Ten random disturbances of two whole runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.functional.runs import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.whole_run, pytest.mark.timeout(2400)]


def test_runs_that_are_disturbed_at_random_end_up_as_if_nothing_had_happened(
    arithmetic_model: str, tmp_path: Path
) -> None:
    command = [sys.executable, "scripts/chaos.py", "--seed", "1", "--runs", "2", "--disturbances", "10"]
    command += ["--variants", "demo", "tensor_parallel", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    results = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert sum(len(result["disturbances"]) for result in results) >= 10
    # Once more is a campaign that was through.
    again = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert again.stdout.startswith(f"{len(results)} runs, ")
