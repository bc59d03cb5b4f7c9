"""Processes that die and users who press Ctrl-C: named, quick, and nothing left behind.

All kinds of processes, killed in all stages: ``test_kill_matrix``. An interrupt while the processes of an
evaluation start: ``test_evaluate``.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.functional.runs import (
    FEWEST_PROCESSES,
    ONE_OF_EACH,
    read_metrics,
    run_grpo,
    running,
    temporary_files,
    wait_for_step,
    wait_until_gone,
)

pytestmark = [pytest.mark.timeout(300), pytest.mark.whole_run]

LONG = [
    "grpo.max_num_steps=1000",
    "grpo.num_prompts_per_step=16",
    "grpo.val_at_start=false",
    "policy.scheduler.decay_style=constant",
    "generation.num_engines=1",
    "cluster.max_restarts=0",
]


def _end(process: subprocess.Popen[str], within_s: float) -> str:
    """Output of a run that must end by itself within that time."""
    output, _ = process.communicate(timeout=within_s)
    return output


@pytest.mark.slow
def test_a_killed_policy_worker_is_named_and_ends_a_run_that_may_not_restart(
    arithmetic_model: str, tmp_path: Path
) -> None:
    with running(tmp_path, LONG) as (process, mark, run_dir):
        wait_for_step(process, run_dir, step=2)
        pids = json.loads((run_dir / "processes.json").read_text())
        os.kill(pids["policy_worker-1"], signal.SIGKILL)
        output = _end(process, within_s=30)
        assert process.returncode == 1
        assert "actor 'policy_worker-1' died during stage" in output
        assert wait_until_gone(mark) == []


@pytest.mark.parametrize("signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_an_interrupt_ends_a_run_cleanly(
    signum: signal.Signals, arithmetic_model: str, tmp_path: Path
) -> None:
    """Without checkpoints, since either signal would wait for one."""
    with running(tmp_path, [*LONG, *FEWEST_PROCESSES, "checkpointing.enabled=false"]) as run:
        process, mark, run_dir = run
        wait_for_step(process, run_dir, step=1)
        # A terminal's Ctrl-C reaches every process of the foreground group.
        send = os.killpg if signum is signal.SIGINT else os.kill
        send(process.pid, signum)
        output = _end(process, within_s=20)
        assert process.returncode == 130
        assert "was interrupted. With checkpointing.enabled=false nothing is saved" in output
        assert "Traceback" not in output
        assert output.rstrip().splitlines()[-1] == f"run_dir: {run_dir}"
        assert wait_until_gone(mark) == []
        assert temporary_files(mark) == []


def test_a_ctrl_c_saves_the_step_under_way_and_the_same_command_goes_on_after_it(
    arithmetic_model: str, tmp_path: Path
) -> None:
    with running(tmp_path, [*LONG, *ONE_OF_EACH]) as (process, mark, run_dir):
        wait_for_step(process, run_dir, step=1)
        os.killpg(process.pid, signal.SIGINT)
        output = _end(process, within_s=60)
        assert process.returncode == 75, output
        last = read_metrics(run_dir)[-1]["step"]
        assert "received SIGINT (Ctrl-C): finishing the step under way" in output
        assert f"received SIGINT (Ctrl-C). Step {last} is saved. The same command continues it." in output
        assert "Traceback" not in output
        assert output.rstrip().splitlines()[-1] == f"run_dir: {run_dir}"
        assert wait_until_gone(mark) == []
        assert temporary_files(mark) == []
    end = f"grpo.max_num_steps={last + 1}"
    resumed = run_grpo(tmp_path, [*LONG, *ONE_OF_EACH, end], name=mark)
    assert resumed.returncode == 0, resumed.output
    assert f"continuing after step {last}" in resumed.output
    assert [*dict.fromkeys(record["step"] for record in resumed.records())] == [*range(1, last + 2)]


@pytest.mark.slow
def test_a_second_ctrl_c_ends_a_run_whose_step_does_not_end(arithmetic_model: str, tmp_path: Path) -> None:
    with running(tmp_path, [*LONG, *FEWEST_PROCESSES]) as (process, mark, run_dir):
        wait_for_step(process, run_dir, step=1)
        pids = json.loads((run_dir / "processes.json").read_text())
        os.kill(pids["policy_worker"], signal.SIGSTOP)
        os.killpg(process.pid, signal.SIGINT)
        assert process.stdout is not None
        while "a second Ctrl-C stops at once" not in process.stdout.readline():
            assert process.poll() is None
        os.killpg(process.pid, signal.SIGINT)
        output = _end(process, within_s=60)
        assert process.returncode == 130, output
        assert "The run was interrupted. No step was saved yet." in output
        assert "Traceback" not in output
        assert wait_until_gone(mark) == []
        assert temporary_files(mark) == []


@pytest.mark.slow
def test_an_interrupt_while_the_processes_start_ends_them_too(arithmetic_model: str, tmp_path: Path) -> None:
    with running(tmp_path, LONG) as (process, mark, _):
        assert process.stdout is not None
        while "engines" not in process.stdout.readline():
            pass
        os.killpg(process.pid, signal.SIGINT)
        output = _end(process, within_s=30)
        assert process.returncode == 130
        assert "The run was interrupted. No step was saved yet." in output
        assert wait_until_gone(mark) == []
        assert temporary_files(mark) == []


@pytest.mark.slow
def test_a_second_interrupt_while_the_results_are_written_ends_at_once(
    arithmetic_model: str, tmp_path: Path
) -> None:
    program = ("-m", "tests.functional.interrupted_twice")
    with running(tmp_path, LONG, program=program) as (process, _, _):
        output = _end(process, within_s=120)
        assert process.returncode == 130
        assert output.rstrip().splitlines()[-1] == "interrupted before all results were written"
        assert "Traceback" not in output


@pytest.mark.slow
def test_a_sigterm_while_ray_starts_ends_the_run(arithmetic_model: str, tmp_path: Path) -> None:
    with running(tmp_path, LONG) as (process, mark, _):
        assert process.stdout is not None
        while "starting Ray" not in process.stdout.readline():
            pass
        process.terminate()
        output = _end(process, within_s=60)
        assert process.returncode == 130
        assert "was interrupted" in output
        assert "Traceback" not in output
        assert wait_until_gone(mark) == []
        assert temporary_files(mark) == []
