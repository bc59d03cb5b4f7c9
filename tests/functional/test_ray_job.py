"""Runs that are submitted to a Ray with a job server, over HTTP, as on clusters that others look after."""

from __future__ import annotations

import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import pytest

from nemo_like.cluster.runtime import free_port
from nemo_like.observability.jsonl import without_measurements
from tests.functional.runs import (
    CONFIG,
    FEWEST_PROCESSES,
    MARK,
    ROOT,
    SCORED,
    kill_all,
    read_metrics,
    run_grpo,
    wait_until_gone,
)

pytestmark = [pytest.mark.whole_run, pytest.mark.timeout(600)]

START_TIMEOUT_S = 120
SHORT = [
    *("grpo.num_prompts_per_step=16", "policy.scheduler.decay_style=constant"),
    *("grpo.val_at_start=false", "grpo.val_at_end=false", *FEWEST_PROCESSES),
]


@dataclass(frozen=True)
class RayHead:
    """A Ray with a job server."""

    address: str  # of the job server
    environment: Mapping[str, str]  # with the token that it asks for

    def job(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """``ray job ...``, from the repository."""
        return subprocess.run(
            ["ray", "job", arguments[0], "--address", self.address, *arguments[1:]],
            cwd=ROOT,
            env={**self.environment},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )


@pytest.fixture(scope="module")
def head() -> Iterator[RayHead]:
    mark, port = uuid.uuid4().hex, free_port()
    # Not pytest's directory: the paths of Ray's sockets may be at most 107 bytes long.
    directory = Path(tempfile.mkdtemp(prefix="ray-"))
    token = directory / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        MARK: mark,
    }
    # Not its usual ports, which another Ray on this machine may have.
    options = {
        "port": free_port(),
        "dashboard-host": "127.0.0.1",
        "dashboard-port": port,
        "dashboard-agent-listen-port": free_port(),
        "ray-client-server-port": free_port(),
        "num-cpus": 16,
        "temp-dir": directory / "ray",
    }
    command = ["ray", "start", "--head", "--block", "--disable-usage-stats"]
    with (directory / "head.log").open("w") as log:
        process = subprocess.Popen(
            [*command, *(f"--{name}={value}" for name, value in options.items())],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            head = RayHead(f"http://127.0.0.1:{port}", environment)
            _wait_for_jobs(head, directory / "head.log")
            yield head
        finally:
            # `ray stop` would end every Ray on the machine, and one that is asked to end takes half a minute.
            # Ray's agents show no mark, for their titles lie where it was, and would write on for a minute.
            descendants = psutil.Process(process.pid).children(recursive=True)
            kill_all(mark)
            for one in descendants:
                with suppress(psutil.NoSuchProcess):
                    one.kill()
            process.wait(timeout=60)
    assert psutil.wait_procs(descendants, timeout=30)[1] == []
    assert wait_until_gone(mark) == []
    shutil.rmtree(directory)


def _wait_for_jobs(head: RayHead, log: Path) -> None:
    """Return once it takes jobs, which is some seconds after it has started.

    It is asked as ``ray job`` asks it, but without a process each time.
    """
    deadline, said = time.monotonic() + START_TIMEOUT_S, "nothing"
    token = Path(head.environment["RAY_AUTH_TOKEN_PATH"]).read_text()
    while time.monotonic() < deadline:
        with suppress(httpx.TransportError):
            answer = httpx.post(
                f"{head.address}/api/jobs/",
                json={"entrypoint": "true"},
                headers={"Authorization": f"Bearer {token}"},
                timeout=START_TIMEOUT_S,
            )
            if answer.is_success:
                return
            said = answer.text
        time.sleep(0.5)
    pytest.fail(f"no job server within {START_TIMEOUT_S} s; it said {said}\n{log.read_text()}")


def submitted(head: RayHead, options: list[str], arguments: list[str]) -> subprocess.CompletedProcess[str]:
    command = ["python", "run_grpo.py", "--config", CONFIG, "cluster.address=auto", *arguments]
    return head.job("submit", "--working-dir", ".", *options, "--", *command)


def in_shared_folders(model: str, log_dir: Path) -> list[str]:
    """A job runs in a copy of the repository without what git ignores, which is deleted after it."""
    return [f"policy.model_name={ROOT / model}", f"logger.log_dir={log_dir}", "logger.run_name=run"]


def test_a_submitted_job_trains_and_its_end_is_the_commands(
    head: RayHead, arithmetic_model: str, tmp_path: Path
) -> None:
    arguments = [*in_shared_folders(arithmetic_model, tmp_path), *SHORT, "grpo.max_num_steps=2"]
    done = submitted(head, [], arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"run_dir: {tmp_path / 'run'}" in done.stdout
    assert [record["step"] for record in read_metrics(tmp_path / "run")] == [1, 2]

    refused = submitted(head, [], [*arguments, "grpo.sed=2"])
    assert refused.returncode == 1
    assert "did you mean grpo.seed" in refused.stdout


@pytest.mark.slow
def test_a_job_that_is_stopped_saves_and_the_next_one_ends_as_one_never_stopped(
    head: RayHead, arithmetic_model: str, tmp_path: Path
) -> None:
    arguments = [*in_shared_folders(arithmetic_model, tmp_path), *SHORT, SCORED, "grpo.max_num_steps=30"]
    # Time to save in, which Ray gives only when it is asked to.
    patient = ["--runtime-env-json", '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "120"}}']
    job = f"job-{uuid.uuid4().hex[:8]}"
    assert submitted(head, [*patient, "--no-wait", "--submission-id", job], arguments).returncode == 0
    run_dir = tmp_path / "run"

    def has_made_two_steps() -> bool:
        return (run_dir / "metrics.jsonl").is_file() and len(read_metrics(run_dir)) >= 2

    _wait_for(has_made_two_steps, lambda: head.job("logs", job).stdout)
    assert "stopped" in head.job("stop", job).stdout
    said = head.job("logs", job).stdout
    assert re.search(r"received SIGTERM\. Step \d+ is saved\. The same command continues it", said)
    assert len(read_metrics(run_dir)) < 30

    continued = submitted(head, patient, arguments)
    assert continued.returncode == 0, continued.stdout
    assert "continuing after step" in continued.stdout
    undisturbed = run_grpo(tmp_path / "alone", [*SHORT, "grpo.max_num_steps=30"])
    assert undisturbed.returncode == 0, undisturbed.output
    records = [without_measurements(record) for record in read_metrics(run_dir)]
    assert records == [without_measurements(record) for record in undisturbed.records()]


def _wait_for(what: Callable[[], bool], said: Callable[[], str], timeout_s: float = 150) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {timeout_s:g} s\n{said()}")
        time.sleep(0.2)
