"""The demo with pictures, as it is: a tiny vision-language model learns to count."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.functional.runs import ROOT, read_metrics, running
from tests.functional.test_image_run import CONFIG

pytestmark = [pytest.mark.slow, pytest.mark.whole_run, pytest.mark.timeout(900)]

TIMEOUT_S = 480


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_tiny_model_learns_to_count(seed: int, tmp_path: Path) -> None:
    model, data = f".cache/models/shapes-s{seed}", ".cache/data/shapes"
    command = [sys.executable, "scripts/prepare_shapes.py", "--output", model, "--data", data]
    subprocess.run([*command, "--seed", str(seed)], cwd=ROOT, check=True, timeout=300)
    seeds = [f"vars.model_seed={seed}", f"grpo.seed={seed}"]
    with running(tmp_path, seeds, config=CONFIG) as (process, _, run_dir):
        output, _ = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 0, output
    records = read_metrics(run_dir)
    before, *_, after = [one["validation/accuracy"] for one in records if "validation/accuracy" in one]
    assert before < 0.5
    assert after > 0.8
    errors = [one["train/token_mult_prob_error"] for one in records if "train/token_mult_prob_error" in one]
    assert len(errors) == 60
    assert max(errors) < 1.0001
