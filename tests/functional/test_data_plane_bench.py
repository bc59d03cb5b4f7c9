"""The data plane's benchmark, at a size at which only its own correctness shows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.functional.data_plane_fixtures import mooncake, simple
from tests.functional.runs import ROOT

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

PLANES = {"ours", "ours_as_used", "transfer_queue_plain", "ray_object_store", "memcpy"}


@pytest.mark.parametrize("backend", [simple, mooncake])
def test_every_plane_moves_the_same_values_and_is_timed(backend: str, tmp_path: Path) -> None:
    """The run compares every fetched value with what was written, and fails on a difference."""
    out = tmp_path / "bench.json"
    command = [sys.executable, "scripts/bench/data_plane.py", "--shapes", "32x16,48x8"]
    command += ["--backend", backend, "--out", str(out), "--quick", "--repetitions", "2"]
    subprocess.run(command, cwd=ROOT, check=True, timeout=500, stdout=subprocess.DEVNULL)
    report = json.loads(out.read_text())
    assert {(one["shape"], one["plane"]) for one in report["results"]} == {
        (shape, plane) for shape in ("32x16", "48x8") for plane in PLANES
    }
    for one in report["results"]:
        assert one["step_ms"] > 0
        assert one["bytes"] > 0
    assert set(report["times_faster"]) == {"32x16", "48x8"}
