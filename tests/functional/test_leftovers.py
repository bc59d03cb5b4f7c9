"""Nothing is left of a run, and of a part of it, however it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nemo_like.cluster.cluster import Cluster
from tests.functional.generation_fixtures import TIMEOUT_S, engine_spec, make_checkpoint
from tests.functional.leftovers import (
    ENGINE_NAMES,
    abandoned_names,
    check_nothing_is_left,
    listening,
    names_of,
    shared_names,
    soon,
    workers_of,
)
from tests.functional.runs import (
    ONE_OF_EACH,
    ROOT,
    read_metrics,
    running,
    wait_for_step,
)


@pytest.fixture
def cluster(private_ray: None) -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.stop()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("leftovers"), tied=False)


def _mapped_names(pid: int) -> set[str]:
    maps = psutil.Process(pid).memory_maps(grouped=True)
    return {Path(one.path.split(" ")[0]).name for one in maps if one.path.startswith("/dev/shm/")}


def _engines_that_meet(before: set[str]) -> dict[str, int]:
    """Process ids of this process's actors by the new names in shared memory that they map."""
    actors = [one for one in psutil.Process().children(recursive=True) if one.name().startswith("ray::")]
    return {
        name: actor.pid
        for actor in actors
        for name in _mapped_names(actor.pid) & (shared_names() - before)
        if name.startswith(ENGINE_NAMES)
    }


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_an_engine_of_two_workers_has_no_name_in_shared_memory_once_it_is_up(
    cluster: Cluster, checkpoint: Path
) -> None:
    """So that it does not matter who is killed later; and they did meet there."""
    engine = cluster.start(engine_spec(checkpoint, "nameless", tensor_parallel_size=2))
    cluster.gather([engine.submit("stats")], stage="start", timeout_s=TIMEOUT_S)
    (pid,) = cluster.gather([engine.process_id()], stage="start", timeout_s=TIMEOUT_S)
    mapped = {name for name in _mapped_names(pid) if name.startswith(ENGINE_NAMES)}
    assert len(mapped) >= 3
    assert not mapped & shared_names()
    before = shared_names()
    workers = workers_of(pid)
    assert len(workers) == 2
    os.kill(pid, signal.SIGKILL)
    psutil.wait_procs(workers, timeout=20)
    assert not abandoned_names(before)


@pytest.mark.timeout(400)
def test_an_engine_that_is_killed_while_its_workers_meet_leaves_no_names(
    cluster: Cluster, checkpoint: Path
) -> None:
    before = shared_names()
    engine = cluster.start(engine_spec(checkpoint, "early", tensor_parallel_size=2))
    pids = {}  # by the name in shared memory that they made
    assert soon(lambda: pids.update(_engines_that_meet(before)) or pids, TIMEOUT_S)
    for name, pid in pids.items():
        os.kill(pid, signal.SIGKILL)
        assert soon(lambda name=name: name not in shared_names())
    assert soon(lambda: not abandoned_names(before))
    assert cluster.dead() == [engine.name]


SWEPT = """
import os, signal, subprocess, sys, tempfile
from nemo_like.cluster.janitor import MARK, swept_directory

with swept_directory(sys.argv[1]) as directory:
    tempfile.mkdtemp()
    marked = {**os.environ, MARK: str(directory / "ray")}
    stopped = subprocess.Popen(["sleep", "600"], env=marked, stdout=subprocess.DEVNULL)
    stopped.send_signal(signal.SIGSTOP)
    unmarked = subprocess.Popen(["sleep", "600"], stdout=subprocess.DEVNULL)
    print(stopped.pid, unmarked.pid, flush=True)
    exec(sys.argv[2])
"""


@pytest.mark.parametrize(
    "end",
    [
        "pass",
        "os.kill(os.getpid(), signal.SIGKILL)",
        # Then the driver does the janitor's work.
        "import psutil; psutil.Process().children()[0].kill()",
    ],
    ids=["normal", "killed driver", "killed janitor"],
)
def test_temporary_files_and_marked_processes_go_with_the_driver(end: str, tmp_path: Path) -> None:
    driver = subprocess.run(
        [sys.executable, "-c", SWEPT, str(tmp_path), end], cwd=ROOT, timeout=60, stdout=subprocess.PIPE
    )
    assert driver.returncode == (-signal.SIGKILL if "SIGKILL" in end else 0)
    stopped, unmarked = map(int, driver.stdout.split())
    try:
        assert soon(lambda: list(tmp_path.iterdir()) == [])
        assert soon(lambda: not psutil.pid_exists(stopped))
        assert psutil.pid_exists(unmarked)
    finally:
        psutil.Process(unmarked).kill()


NUM_STEPS = 30
TENSOR_PARALLEL = [
    *(f"grpo.max_num_steps={NUM_STEPS}", "grpo.val_at_start=false", "grpo.val_at_end=false"),
    *("grpo.num_prompts_per_step=16", "policy.scheduler.decay_style=constant"),
    *("generation.vllm_cfg.tensor_parallel_size=2", *ONE_OF_EACH),
]


@pytest.mark.slow
@pytest.mark.whole_run
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("end", "exit_code"),
    [
        ("a killed worker of an engine", 0),
        ("Ctrl-C", 75),
        ("SIGTERM", 130),
        ("a killed policy worker", 1),
    ],
)
def test_nothing_is_left_after(end: str, exit_code: int, arithmetic_model: str, tmp_path: Path) -> None:
    overrides = list(TENSOR_PARALLEL)
    if exit_code:
        overrides += ["grpo.max_num_steps=1000", f"checkpointing.enabled={end == 'Ctrl-C'}"]
    before = shared_names()
    with running(tmp_path, overrides) as (process, mark, run_dir):
        wait_for_step(process, run_dir, step=1, timeout_s=300)
        assert not {name for name in names_of(mark) if name.startswith(ENGINE_NAMES)}
        pids = json.loads((run_dir / "processes.json").read_text())
        if end == "a killed worker of an engine":
            workers_of(pids["engine"])[1].kill()
        listeners = listening(mark)
        match end:
            case "a killed policy worker":
                os.kill(pids["policy_worker"], signal.SIGKILL)
            case "Ctrl-C":
                os.killpg(process.pid, signal.SIGINT)
            case "SIGTERM":
                process.terminate()
        output, _ = process.communicate(timeout=300)
        assert process.returncode == exit_code, output
        check_nothing_is_left(mark, listeners, before)
    if not exit_code:
        assert "died during stage" in output
        assert [record["step"] for record in read_metrics(run_dir)] == list(range(1, NUM_STEPS + 1))
