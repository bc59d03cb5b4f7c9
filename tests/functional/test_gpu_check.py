"""scripts/gpu_check.py on CPUs, where it tries itself: real runs, read and judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.functional.runs import ROOT

pytestmark = [pytest.mark.timeout(600), pytest.mark.whole_run]


def test_the_check_reads_and_judges_real_runs(arithmetic_model: str, tmp_path: Path) -> None:
    command = [sys.executable, "scripts/gpu_check.py", "--device=cpu", "--demo-steps=2"]
    command += ["--parts=transports,demo,model", f"--output={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("nothing is off")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["reasons"] == []
    parts = report["parts"]
    assert parts["transports"]["figures"]["transports"]["collective_gb_per_s"] > 0
    demo = parts["demo"]["figures"]["demo"]
    assert len(demo["accuracies"]) == 2
    model = parts["model"]["figures"]["model-shared_memory"]
    for run in (demo, model):
        assert set(run["stages"]) == {"weight_sync", "generation", "logprobs", "policy_training"}
        assert run["weight_sync"]["bytes"] > 0
        assert 1 <= run["mismatch"]["token_mult_prob_error"] < 1.00002
        assert run["memory"] == []
    assert not (tmp_path / "random_model").exists()
