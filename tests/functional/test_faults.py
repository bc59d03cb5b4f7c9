"""Processes that die and users who press Ctrl-C: named, quick, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from nemo_like.observability.jsonl import without_measurements
from tests.functional.runs import read_metrics, run_grpo, running, wait_for_step, wait_until_gone

pytestmark = [pytest.mark.timeout(300), pytest.mark.whole_run]

LONG = [
    "grpo.max_num_steps=1000",
    "grpo.val_at_start=false",
    "policy.scheduler.decay_style=constant",
    "generation.num_engines=1",
    "cluster.max_restarts=0",
]


def _end(process: subprocess.Popen[str], within_s: float) -> str:
    """Output of a run that must end by itself within that time."""
    output, _ = process.communicate(timeout=within_s)
    return output


@pytest.mark.parametrize(
    "victim",
    [
        "policy_worker-1",
        pytest.param("rollout", marks=pytest.mark.slow),
        pytest.param("engine", marks=pytest.mark.slow),
        pytest.param("data_plane", marks=pytest.mark.slow),
        pytest.param("environment", marks=pytest.mark.slow),
    ],
)
def test_a_killed_actor_is_named_and_ends_the_run(victim: str, arithmetic_model: str, tmp_path: Path) -> None:
    with running(tmp_path, LONG) as (process, mark, run_dir):
        wait_for_step(process, run_dir, step=2)
        pids = json.loads((run_dir / "processes.json").read_text())
        os.kill(pids[victim], signal.SIGKILL)
        output = _end(process, within_s=30)
        assert process.returncode == 1
        assert f"actor '{victim}' died during stage" in output
        assert wait_until_gone(mark) == []


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["policy_worker-1", "engine", "data_plane"])
def test_a_run_recovers_from_a_killed_actor_with_the_metrics_of_an_undisturbed_one(
    victim: str, arithmetic_model: str, tmp_path: Path
) -> None:
    command = ["grpo.max_num_steps=6", "grpo.val_at_end=false", "generation.num_engines=1"]
    command += ["checkpointing.save_period=2"]
    undisturbed = run_grpo(tmp_path, command)
    with running(tmp_path, command) as (process, mark, run_dir):
        wait_for_step(process, run_dir, step=3)
        pids = json.loads((run_dir / "processes.json").read_text())
        os.kill(pids[victim], signal.SIGKILL)
        output = _end(process, within_s=200)
    assert process.returncode == 0, output
    assert f"actor '{victim}' died" in output
    assert "restart 1 of 2" in output
    records = [without_measurements(record) for record in read_metrics(run_dir)]
    assert records == [without_measurements(record) for record in undisturbed.records()]
    assert wait_until_gone(mark) == []


@pytest.mark.parametrize("signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupt_ends_the_run_cleanly(
    signum: signal.Signals, arithmetic_model: str, tmp_path: Path
) -> None:
    with running(tmp_path, LONG) as (process, mark, run_dir):
        wait_for_step(process, run_dir, step=2)
        # A terminal's Ctrl-C reaches every process of the foreground group.
        send = os.killpg if signum is signal.SIGINT else os.kill
        send(process.pid, signum)
        output = _end(process, within_s=20)
        assert process.returncode == 130
        assert "was interrupted" in output
        assert "Traceback" not in output
        assert output.rstrip().splitlines()[-1] == f"run_dir: {run_dir}"
        assert wait_until_gone(mark) == []


def test_an_interrupt_while_the_processes_start_ends_them_too(arithmetic_model: str, tmp_path: Path) -> None:
    with running(tmp_path, LONG) as (process, mark, _):
        assert process.stdout is not None
        while "engines" not in process.stdout.readline():
            pass
        os.killpg(process.pid, signal.SIGINT)
        _end(process, within_s=30)
        assert process.returncode == 130
        assert wait_until_gone(mark) == []
