"""The benchmark of the driver's own work, at a size at which only its own correctness shows."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.functional.runs import ROOT


@pytest.mark.parametrize("micro_batches", ["padded", "shared"])
def test_every_size_is_timed_and_twice_the_replicas_halve_what_a_worker_gets(micro_batches: str) -> None:
    command = [sys.executable, "scripts/bench/driver_scale.py", "--workers", "8,16", "--samples", "1024,2048"]
    command += ["--rounds", "1", "--micro-batches", micro_batches]
    run = subprocess.run(command, cwd=ROOT, check=True, timeout=100, capture_output=True, text=True)
    report = json.loads(run.stdout)
    assert set(report) == {f"more {what}, TP {tp}" for what in ("workers", "samples") for tp in (1, 8)}
    for series in report.values():
        assert len(series["growth"]) == len(series["sizes"]) - 1
        for size in series["sizes"]:
            assert set(size["seconds"]) == {"sharding", "dispatch", "gathering", "tripwires", "elsewhere"}
    for tp in (1, 8):
        few, many = report[f"more workers, TP {tp}"]["sizes"]
        assert (few["workers"], many["workers"]) == (8, 16)
        assert few["bytes_per_worker"] / many["bytes_per_worker"] == pytest.approx(2, rel=0.15)
