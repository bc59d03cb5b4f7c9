"""The rule: the driver carries metadata only."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.functional.driver_traffic import CONTROL_BYTES, NUM_GENERATIONS, NUM_PROMPTS, PROMPT_LENGTHS
from tests.functional.runs import ROOT

NUM_SAMPLES = NUM_PROMPTS * NUM_GENERATIONS


@pytest.mark.whole_run
@pytest.mark.timeout(300)
def test_what_crosses_the_driver_does_not_depend_on_the_sequence_length(
    arithmetic_model: str, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.functional.driver_traffic", str(tmp_path)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout.splitlines()[-1])
    short, long = report["steps"]
    growth = PROMPT_LENGTHS[1] - PROMPT_LENGTHS[0]
    assert long["tokens"] - short["tokens"] > 0.9 * growth * NUM_SAMPLES
    # A token column would add at least one byte per token: 194 a sample.
    assert abs(long["bytes"] - short["bytes"]) / NUM_SAMPLES < 4
    assert long["bytes"] / NUM_SAMPLES < 1500
    assert long["columns"]["messages"] - short["columns"]["messages"] > 0.9 * growth * NUM_SAMPLES
    assert report["control"] >= 2 * CONTROL_BYTES
    assert report["tensor_libraries"] == []
