"""scripts/gpu_check.py on CPUs, where it tries itself: real runs, read and judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.functional.runs import ROOT

pytestmark = [pytest.mark.timeout(600), pytest.mark.whole_run]


WITHOUT_ENGINES = ["layers", "transports", "offload", "head", "checkpoint"]


@pytest.mark.slow
@pytest.mark.parametrize("parts", [WITHOUT_ENGINES, ["model"], ["demo"]], ids="+".join)
def test_the_check_reads_and_judges_real_runs(
    parts: list[str], arithmetic_model: str, tmp_path: Path
) -> None:
    command = [sys.executable, "scripts/gpu_check.py", "--device=cpu", "--demo-steps=2"]
    command += [f"--parts={','.join(parts)}", f"--output={tmp_path}"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.rstrip().endswith("nothing is off")
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["reasons"] == []
    figures = {name: report["parts"][name]["figures"] for name in parts}
    if "transports" in parts:
        assert figures["transports"]["transports"]["collective_gb_per_s"] > 0
        assert figures["transports"]["tickets"]["with_event"]["seconds"] > 0
        assert figures["layers"]["layers"].keys() == {"start", "phases", "waits"}
        assert figures["offload"]["offload"].keys() == {"host_memory", "optimizer", "reference"}
        assert figures["head"]["head"]["head"].keys() >= {"256 MiB", "1024 MiB"}
        assert figures["checkpoint"]["checkpoint"]["checkpoint"]["load_s"] > 0
    if "demo" in parts:
        assert len(figures["demo"]["demo"]["accuracies"]) == 2
    runs = {"demo": "demo", "model": "model-shared_memory"}
    for run in (figures[part][name] for part, name in runs.items() if part in parts):
        assert set(run["stages"]) == {"weight_sync", "generation", "logprobs", "policy_training"}
        assert run["weight_sync"]["bytes"] > 0
        assert 1 <= run["mismatch"]["token_mult_prob_error"] < 1.00002
        assert run["memory"] == []
    assert not (tmp_path / "random_model").exists()
