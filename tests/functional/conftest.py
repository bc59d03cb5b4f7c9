from __future__ import annotations

import subprocess
import sys

import pytest

from tests.functional.runs import ROOT


@pytest.fixture(scope="session")
def arithmetic_model() -> str:
    """The demo's checkpoint for seed 1, made on first use and kept like the demo's own."""
    path = ".cache/models/arithmetic-d2-s1"
    command = [sys.executable, "scripts/prepare_arithmetic.py", "--output", path, "--seed", "1"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300, stdout=subprocess.DEVNULL)
    return path
