"""A run that is watched from outside: by its directory, and at its address for Prometheus."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import IO

import pytest
from prometheus_client.parser import text_string_to_metric_families

from nemo_like.cluster.runtime import free_port
from tests.functional.leftovers import check_nothing_is_left, listening, shared_names
from tests.functional.runs import (
    CONFIG,
    ONE_OF_EACH,
    ROOT,
    SCORED,
    read_metrics,
    running,
    wait_for_step,
)

pytestmark = [pytest.mark.timeout(300), pytest.mark.whole_run]
LONG = [
    *("grpo.max_num_steps=1000", "grpo.val_at_start=false", "grpo.num_prompts_per_step=16"),
    *("policy.scheduler.decay_style=constant", "checkpointing.enabled=false", *ONE_OF_EACH),
    "generation.vllm_cfg.tensor_parallel_size=2",  # whose workers meet in shared memory
]


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


def test_a_run_is_watched_until_its_driver_is_killed_of_which_nothing_is_left(
    arithmetic_model: str, tmp_path: Path
) -> None:
    names = shared_names()
    port = f"logger.prometheus.port={free_port()}"
    with running(tmp_path, [*LONG, port]) as (process, mark, run_dir):
        wait_for_step(process, run_dir, step=1)
        once, _ = watch(str(run_dir), "--once").communicate(timeout=60)
        assert "/1000" in once and "generation" in once
        assert f"running: process {process.pid} on host " in once
        address = f"http://127.0.0.1:{port.partition('=')[2]}/metrics"
        with urllib.request.urlopen(address, timeout=30) as answer:
            families = {one.name: one for one in text_string_to_metric_families(answer.read().decode())}
        step = families["nemo_like_latest_step"].samples[0].value
        (loss,) = families["nemo_like_train_loss"].samples
        assert loss.labels == {"run": mark, "metric": "train/loss"}
        wait_for_step(process, run_dir, step=int(step))
        logged = {record["step"]: record for record in read_metrics(run_dir)}
        assert loss.value == logged[int(step)]["train/loss"]

        # Another run that would listen there is refused before it starts anything.
        command = [sys.executable, "run_grpo.py", "--config", CONFIG, SCORED, *LONG, port]
        second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert second.returncode == 2
        assert f"{port} is in use on 127.0.0.1; another run may have it" in second.stderr

        watcher = watch(str(run_dir))
        assert watcher.stdout is not None
        later = first_step_shown(watcher.stdout) + 2
        wait_for_step(process, run_dir, later)
        listeners = listening(mark)
        os.kill(process.pid, signal.SIGKILL)
        # Not by communicate(), which leaves out what was read along with the first step.
        shown = watcher.stdout.read()
        assert watcher.wait(timeout=60) == 1
        assert f"step {later}/1000  reward " in shown
        assert f"The run died: process {process.pid} on host " in shown
        assert "left no last word; logs are in " in shown
        assert shown.endswith(f"run_dir: {run_dir}\n")
        check_nothing_is_left(mark, listeners, names)
