"""Whole runs of ``run_grpo.py`` as a user starts them, for the tests of the main job."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import psutil
import pytest

from nemo_like.observability.jsonl import without_measurements
from tests.functional.warm_servers import forked_script, sharing

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "configs/grpo_arithmetic_cpu.yaml"
# The demo's configuration leaves the pass that scores before training out; what is tested has it.
SCORED = "loss_fn.use_generation_logprobs_as_prev=false"
# For what does not depend on how many policy workers and engines there are, which take most of a run's start.
ONE_OF_EACH = ("policy.data_parallel_size=1", "generation.num_engines=1")
# For what is not about the data plane, either: TransferQueue's processes take a quarter of it. W&B has one.
FEWEST_PROCESSES = (*ONE_OF_EACH, "data_plane.backend=in_memory", "logger.wandb.mode=disabled")
RUN_TIMEOUT_S = 300
DEMO_STEPS = 20
MARK = "NEMO_LIKE_TEST_RUN"


@dataclass(frozen=True)
class FinishedRun:
    """What a run left: exit code, output, and the metrics by step."""

    returncode: int
    output: str
    run_dir: Path
    mark: str
    temporary_files: list[str]  # that were left

    def metrics(self, key: str) -> list[float]:
        """Values of one metric, step by step."""
        return [record[key] for record in self.records() if key in record]

    def records(self) -> list[dict[str, float]]:
        return read_metrics(self.run_dir)

    def processes_left(self) -> list[str]:
        return processes_of(self.mark)


def read_metrics(run_dir: Path) -> list[dict[str, float]]:
    """One object per line of metrics.jsonl."""
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def without_dump(record: Mapping[str, float]) -> dict[str, float]:
    """A step's metrics as they are where its rollouts are not dumped, so without the entropies that were
    written; without those that depend on the machine's speed, too."""
    entropies, total = "data_plane/write/entropies/", "data_plane/write/bytes"
    kept = {name: one for name, one in without_measurements(record).items() if not name.startswith(entropies)}
    if total in kept:
        kept[total] -= record.get(f"{entropies}bytes", 0.0)
    return kept


def processes_of(mark: str) -> list[str]:
    """Command lines of the live processes that descend from the run with this mark."""
    left = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                left.append(" ".join(process.cmdline())[:120])
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return left


@contextmanager
def running(
    log_dir: Path,
    overrides: Sequence[str] = (),
    name: str | None = None,
    config: str = CONFIG,
    program: Sequence[str] = ("run_grpo.py",),
) -> Iterator[tuple[subprocess.Popen[str], str, Path]]:
    """A run in the background: its process, its mark, its run directory. Killed at the end if need be.

    The mark is the run's name. Since processes and files are found by it, no other run on the machine may
    have the same: in tests a ``name`` is the mark of an earlier run, or that of a ``copied_run``.
    """
    mark = name or uuid.uuid4().hex
    command = [*program, *_arguments(log_dir, mark, config, overrides)]
    with _environment(mark) as environment:
        process = _started(command, environment)
        try:
            yield process, mark, log_dir / mark
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate(timeout=30)


def _started(command: Sequence[str], environment: Mapping[str, str]) -> subprocess.Popen[str]:
    """Start a script, with its arguments. It leads a session, and its output may be read."""
    output, theirs = os.pipe()
    fcntl.fcntl(theirs, fcntl.F_SETPIPE_SZ, 1 << 20)  # a run whose output nobody reads stops where it is full
    stdout = os.fdopen(output)
    try:
        fork = forked_script(command, environment, theirs, theirs, stdout)
        if fork is not None:
            return cast("subprocess.Popen[str]", fork)
        process = subprocess.Popen(
            # Tests in the background of a shell ignore SIGINT, which the run would inherit.
            ["env", "--default-signal=INT", sys.executable, *command],
            cwd=ROOT,
            env=environment,
            stdout=theirs,
            stderr=theirs,
            text=True,
            start_new_session=True,
        )
    finally:
        os.close(theirs)
    process.stdout = stdout
    return process


def _arguments(log_dir: Path, mark: str, config: str, overrides: Sequence[str]) -> list[str]:
    return ["--config", config, f"logger.log_dir={log_dir}", f"logger.run_name={mark}", SCORED, *overrides]


@contextmanager
def _environment(mark: str) -> Iterator[dict[str, str]]:
    """Environment variables of a run, whose folder for temporary files is there in the ``with`` block."""
    temporary = temporary_directory(mark)
    temporary.mkdir(exist_ok=True)
    try:
        yield {**os.environ, **sharing(), MARK: mark, "TMPDIR": str(temporary)}
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def temporary_directory(mark: str) -> Path:
    """Where this run puts its temporary files; a short path, since sockets are among them."""
    return Path(tempfile.gettempdir()) / f"run-{mark[:8]}"


def temporary_files(mark: str) -> list[str]:
    """Names of what the run has there."""
    return sorted(path.name for path in temporary_directory(mark).iterdir())


def run_grpo(
    log_dir: Path,
    overrides: Sequence[str] = (),
    name: str | None = None,
    config: str = CONFIG,
    timeout_s: float = RUN_TIMEOUT_S,
    program: Sequence[str] = ("run_grpo.py",),
) -> FinishedRun:
    """A whole run; with the name of an earlier one, its continuation."""
    with running(log_dir, overrides, name, config, program) as (process, mark, run_dir):
        told, _ = process.communicate(timeout=timeout_s)
        return FinishedRun(process.returncode, told, run_dir, mark, temporary_files(mark))


def copied_run(run: FinishedRun, directory: Path) -> Path:
    """A copy of a finished run in this directory, under a name of its own, with which it can continue."""
    return Path(shutil.copytree(run.run_dir, directory / uuid.uuid4().hex))


def run_script(command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """A script of this project that starts engines or runs, with its arguments, to its end."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        environment = {**os.environ, **sharing()}
        fork = forked_script(command, environment, output.fileno(), errors.fileno(), None)
        if fork is None:
            return subprocess.run(
                [sys.executable, *command],
                cwd=ROOT,
                env=environment,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                check=False,
            )
        try:
            code = fork.wait(timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(fork.pid, signal.SIGKILL)
            raise
        for one in (output, errors):
            one.seek(0)
        return subprocess.CompletedProcess([*command], code, output.read().decode(), errors.read().decode())


def wait_for_step(process: subprocess.Popen[str], run_dir: Path, step: int, timeout_s: float = 120) -> None:
    """Return once the metrics of this training step are on disk."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            pytest.fail(f"the run ended early:\n{process.communicate()[0]}")
        if (run_dir / "metrics.jsonl").is_file() and any(
            record["step"] >= step and "train/loss" in record for record in read_metrics(run_dir)
        ):
            return
        time.sleep(0.1)
    pytest.fail(f"step {step} was not reached within {timeout_s:g} s")


def kill_all(mark: str) -> None:
    """SIGKILL to every process of the run at once, its Ray included; to this one last, where it is one."""
    for process in sorted(psutil.process_iter(), key=lambda one: one.pid == os.getpid()):
        try:
            if process.environ().get(MARK) == mark:
                process.kill()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue


def listening_elsewhere(processes: Iterable[psutil.Process]) -> dict[str, str]:
    """Addresses other than loopback's on which these processes listen, with the names of the processes."""
    names = {process.pid: process.name() for process in processes}
    return {
        f"{one.laddr.ip}:{one.laddr.port}": names[one.pid]
        for one in psutil.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.pid in names and not is_loopback(one.laddr.ip)
    }


def attack(ports: Iterable[int], folder: Path) -> None:
    """Be a stranger at each of these ports, as another user where this one is root; fails where something was
    unpickled there. ``folder`` is an empty one."""
    folder.chmod(0o777)
    stranger = [sys.executable, "-m", "tests.functional.stranger", str(folder), *map(str, ports)]
    subprocess.run(stranger, cwd=ROOT, check=True, timeout=60)
    assert not list(folder.iterdir())


def ports_of(processes: Iterable[psutil.Process]) -> list[int]:
    """Return the ports on which these processes listen."""
    pids = {process.pid for process in processes}
    return sorted(
        {
            one.laddr.port
            for one in psutil.net_connections("tcp")
            if one.status == psutil.CONN_LISTEN and one.pid in pids
        }
    )


def resident_bytes(processes: Sequence[psutil.Process]) -> int:
    """Return how much memory these processes take; there must be some."""
    assert processes
    return sum(process.memory_info().rss for process in processes)


def is_loopback(address: str) -> bool:
    return address == "::1" or address.removeprefix("::ffff:").startswith("127.")


def wait_until_gone(mark: str, timeout_s: float = 30) -> list[str]:
    """Processes of the run that are left after a grace period; empty as soon as there are none."""
    deadline = time.monotonic() + timeout_s
    while (left := processes_of(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return left
