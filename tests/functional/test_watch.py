"""A run that goes on, seen from outside: by strangers at its ports, by those who watch it and by those who
kill a part of it, and at last the run."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nemo_like.cluster.runtime import free_port
from tests.functional.leftovers import (
    ENGINE_NAMES,
    check_nothing_is_left,
    listening,
    names_of,
    processes,
    shared_names,
    workers_of,
)
from tests.functional.runs import (
    CONFIG,
    ONE_OF_EACH,
    ROOT,
    SCORED,
    attack,
    listening_elsewhere,
    ports_of,
    read_metrics,
    resident_bytes,
    running,
    temporary_directory,
    wait_for_step,
)

pytestmark = [pytest.mark.timeout(300), pytest.mark.whole_run]
LONG = [
    *("grpo.max_num_steps=1000", "grpo.val_at_start=false", "grpo.num_prompts_per_step=16"),
    *("policy.scheduler.decay_style=constant", "checkpointing.enabled=false", *ONE_OF_EACH),
    "logger.wandb.mode=disabled",
    "generation.vllm_cfg.tensor_parallel_size=2",  # whose workers meet in shared memory
    # It goes on for as long as these tests take, and leaves the machine to others meanwhile.
    *("loss_fn.kind=tests.functional.own_losses:slow", "++loss_fn.arguments.seconds=2.0"),
]


@dataclass(frozen=True)
class LiveRun:
    """A run of a thousand steps that has made the first."""

    process: subprocess.Popen[str]
    mark: str
    run_dir: Path
    port: int  # for Prometheus
    names_before: set[str]  # in shared memory

    def goes_on(self, num_steps: int) -> None:
        """Return once it has made so many further steps."""
        wait_for_step(self.process, self.run_dir, read_metrics(self.run_dir)[-1]["step"] + num_steps)

    def process_ids(self) -> dict[str, int]:
        ids: dict[str, int] = json.loads((self.run_dir / "processes.json").read_text())
        return ids


@pytest.fixture(scope="module")
def live(arithmetic_model: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveRun]:
    """The run of all tests of this file, which the last of them kills."""
    names, port = shared_names(), free_port()
    prometheus = f"logger.prometheus.port={port}"
    with running(tmp_path_factory.mktemp("live"), [*LONG, prometheus]) as (process, mark, run_dir):
        wait_for_step(process, run_dir, step=1)
        yield LiveRun(process, mark, run_dir, port, names)


def test_nobody_else_reaches_a_run(live: LiveRun, tmp_path: Path) -> None:
    """Nobody on another machine does. Another user of this one reaches its ports, where nothing that he sends
    is unpickled, or kept."""
    others = [one for one in processes(live.mark) if one.pid != live.process.pid]
    assert listening_elsewhere(others) == {}
    keepers = [one for one in others if "TransferQueue" in one.name() or "StorageUnit" in one.name()]
    kept = resident_bytes(keepers)
    (folder := tmp_path / "stranger").mkdir()
    attack(ports_of(others), folder)
    assert resident_bytes(keepers) - kept < 128 << 20
    # Nor does he reach the store through which the policy workers found each other.
    (store,) = temporary_directory(live.mark).rglob("meeting-*/store")
    assert store.parent.stat().st_mode & 0o077 == 0
    live.goes_on(1)


def test_an_engine_whose_own_worker_is_killed_is_replaced_and_no_step_is_lost(live: LiveRun) -> None:
    assert not {name for name in names_of(live.mark) if name.startswith(ENGINE_NAMES)}
    engine = live.process_ids()["engine"]
    workers = workers_of(engine)
    assert len(workers) == 2
    workers[1].kill()
    live.goes_on(2)
    assert live.process_ids()["engine"] != engine
    steps = [record["step"] for record in read_metrics(live.run_dir)]
    assert steps == [*range(1, len(steps) + 1)]


def watch(*arguments: str) -> subprocess.Popen[str]:
    """scripts/watch.py as a user calls it."""
    command = [sys.executable, "scripts/watch.py", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def first_step_shown(output: IO[str]) -> int:
    """The first step that it shows; before it may come notes, such as that Ray started at the second try."""
    shown: list[str] = []
    while line := output.readline():
        if found := re.match(r"step (\d+)/1000  reward ", line):
            return int(found[1])
        shown.append(line)
    pytest.fail(f"no step was shown, but: {shown}")


def test_a_run_is_watched_until_its_driver_is_killed_of_which_nothing_is_left(live: LiveRun) -> None:
    process, run_dir = live.process, live.run_dir
    once, _ = watch(str(run_dir), "--once").communicate(timeout=60)
    assert "/1000" in once and "generation" in once
    assert f"running: process {process.pid} on host " in once
    check_prometheus(live)
    check_refused_at_its_port(live)

    watcher = watch(str(run_dir))
    assert watcher.stdout is not None
    later = first_step_shown(watcher.stdout) + 2
    wait_for_step(process, run_dir, later)
    listeners = listening(live.mark)
    os.kill(process.pid, signal.SIGKILL)
    # Not by communicate(), which leaves out what was read along with the first step.
    shown = watcher.stdout.read()
    assert watcher.wait(timeout=60) == 1
    assert f"step {later}/1000  reward " in shown
    assert f"The run died: process {process.pid} on host " in shown
    assert "left no last word; logs are in " in shown
    assert shown.endswith(f"run_dir: {run_dir}\n")
    check_nothing_is_left(live.mark, listeners, live.names_before)


def check_prometheus(live: LiveRun) -> None:
    address = f"http://127.0.0.1:{live.port}/metrics"
    with urllib.request.urlopen(address, timeout=30) as answer:
        families = {one.name: one for one in text_string_to_metric_families(answer.read().decode())}
    step = int(families["nemo_like_latest_step"].samples[0].value)
    (loss,) = families["nemo_like_train_loss"].samples
    assert loss.labels == {"run": live.mark, "metric": "train/loss"}
    wait_for_step(live.process, live.run_dir, step)
    logged = {record["step"]: record for record in read_metrics(live.run_dir)}
    assert loss.value == logged[step]["train/loss"]


def check_refused_at_its_port(live: LiveRun) -> None:
    """Another run that would listen there is refused before it starts anything."""
    port = f"logger.prometheus.port={live.port}"
    command = [sys.executable, "run_grpo.py", "--config", CONFIG, SCORED, *LONG, port]
    second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert second.returncode == 2
    assert f"{port} is in use on 127.0.0.1; another run may have it" in second.stderr
