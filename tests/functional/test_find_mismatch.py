"""What ``find_mismatch.py`` says of a healthy model, and of arguments that it cannot use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.functional.runs import ROOT

pytestmark = [pytest.mark.timeout(600), pytest.mark.engine]


def find(*arguments: str, timeout_s: float = 500) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/find_mismatch.py", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=timeout_s)


def test_a_healthy_model_gets_its_certificate(arithmetic_model: str, tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    done = find("--model", arithmetic_model, "--json", str(found))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "engine, trainer and transformers agree but for rounding"
    written = json.loads(found.read_text())
    assert written["holds"] and written["moved"] > 0.01
    rows = {(row["weights"], row["what"]): row["mean_gap"] for row in written["comparisons"]}
    assert len(rows) == 6 and max(rows.values()) < 5e-6


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--model", "none/such"], "policy.model_name"),
        (["--model", "none/such", "--updates", "-1"], "--updates -1 must be 0 or more"),
        ([], "--model"),
    ],
)
def test_what_cannot_be_compared_is_refused_before_anything_starts(arguments: list[str], said: str) -> None:
    done = find(*arguments, timeout_s=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert said in done.stderr
