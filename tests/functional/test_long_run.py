"""Three hundred steps hold on to nothing."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.functional.runs import ROOT

NUM_STEPS = 300
MAX_GROWTH_MIB = 20.0  # of one process over all steps: 70 KiB a step, a fraction of what a step moves


@pytest.mark.slow
@pytest.mark.whole_run
@pytest.mark.timeout(600)
@pytest.mark.parametrize("overrides", [[], ["grpo.max_staleness=2"]], ids=["alternating", "two ahead"])
def test_no_process_grows_and_nothing_piles_up(arithmetic_model: str, overrides: list[str]) -> None:
    command = [sys.executable, "scripts/bench/long_run.py", "--steps", str(NUM_STEPS), *overrides]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    growth, looks = result["growth"], result["looks"]
    assert [look["step"] for look in looks] == list(range(25, NUM_STEPS + 1, 25))
    assert {"driver", "rollout", "engine", "data_plane", "policy_worker-0"} <= growth["allocated_mib"].keys()
    assert {name: mib for name, mib in growth["allocated_mib"].items() if mib > MAX_GROWTH_MIB} == {}
    assert {name: count for name, count in growth["num_fds"].items() if count > 1} == {}
    assert growth["object_store_mib"] <= 1
    assert growth["num_references"] <= 1
    assert growth["num_shared_files"] <= 1
    # Two checkpoints are kept. A validation leaves its answers, and in the files of W&B a table of them and
    # two copies to upload; every tenth step leaves its rollouts.
    num_texts = NUM_STEPS // 50 * 4 + NUM_STEPS // 10
    # A run that is ahead begins files of its journal after each checkpoint: of the driver and of the engine.
    num_journals = NUM_STEPS // 50 * 2 if overrides else 0
    assert looks[-1]["num_run_files"] <= looks[0]["num_run_files"] + 2 * 11 + num_texts + num_journals
