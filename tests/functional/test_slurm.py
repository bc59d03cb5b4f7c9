"""scripts/slurm on a real Slurm of two nodes, private to the test."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from nemo_like.observability.jsonl import without_measurements
from tests.functional.runs import CONFIG, SCORED, read_metrics, run_grpo
from tests.functional.slurm_fixtures import Slurm, missing, private_slurm

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(missing()), reason=f"Slurm is not installed; packages: {missing()}"),
]

SCRIPT = "scripts/slurm/run.sbatch"
# Both nodes are this machine; CPUs only count actors.
ONE_MACHINE = {"CPUS_PER_NODE": "4", "VENV": sys.prefix}


@pytest.fixture(scope="module")
def slurm() -> Iterator[Slurm]:
    with private_slurm(num_nodes=2, jobs_per_node=2) as slurm:
        yield slurm


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {**ONE_MACHINE, "JOB_DIR": str(tmp_path / "job")}


def sbatch(slurm: Slurm, tmp_path: Path, arguments: list[str], environment: dict[str, str]) -> str:
    """Submit; the job's number."""
    output = f"--output={tmp_path / 'slurm.out'}"
    done = slurm.run("sbatch", "--parsable", output, *arguments, **environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def wait_for(
    slurm: Slurm, job: str, what: Callable[[], bool], tmp_path: Path, timeout_s: float = 120
) -> None:
    deadline = time.monotonic() + timeout_s
    while not what():
        if time.monotonic() > deadline:
            output = (tmp_path / "slurm.out").read_text() if (tmp_path / "slurm.out").exists() else ""
            pytest.fail(f"not within {timeout_s:g} s: {slurm.job(job)}\n{output}")
        time.sleep(0.2)


def ends(slurm: Slurm, job: str, tmp_path: Path, timeout_s: float = 200) -> tuple[str, str]:
    """State and output of a job that must end."""
    running = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING", "REQUEUED")
    wait_for(slurm, job, lambda: slurm.job(job)["JobState"] not in running, tmp_path, timeout_s)
    return slurm.job(job)["JobState"], (tmp_path / "slurm.out").read_text()


def test_a_node_that_cannot_join_ends_the_job_at_once_and_is_named(
    slurm: Slurm, environment: dict[str, str], tmp_path: Path
) -> None:
    nothing = {"VENV": "/nowhere", "PATH": "/usr/bin:/bin"}
    job = sbatch(slurm, tmp_path, ["--nodes=2", SCRIPT], {**environment, **nothing})
    state, output = ends(slurm, job, tmp_path, timeout_s=60)
    assert state == "FAILED"
    assert "node node1 could not join: there is no ray: VENV=/nowhere has none" in output


def test_a_node_that_does_not_join_in_time_is_named(
    slurm: Slurm, environment: dict[str, str], tmp_path: Path
) -> None:
    job = sbatch(slurm, tmp_path, ["--nodes=2", SCRIPT], {**environment, "NODE_TIMEOUT_S": "1"})
    state, output = ends(slurm, job, tmp_path, timeout_s=60)
    assert state == "FAILED"
    assert f"node node1 did not join within 1 s; what it said is in {tmp_path}/job/nodes/node1.log" in output


@pytest.mark.whole_run
def test_two_nodes_join_the_job_trains_and_all_logs_are_in_its_directory(
    slurm: Slurm, environment: dict[str, str], arithmetic_model: str, tmp_path: Path
) -> None:
    overrides = [
        *("--config", CONFIG, "grpo.max_num_steps=2", "grpo.num_prompts_per_step=16"),
        *("grpo.val_at_start=false", "grpo.val_at_end=false", "policy.scheduler.decay_style=constant"),
        *("generation.num_engines=1", "checkpointing.enabled=false", "logger.wandb.mode=disabled"),
    ]
    job = sbatch(slurm, tmp_path, ["--nodes=2", SCRIPT, *overrides], environment)
    state, output = ends(slurm, job, tmp_path)
    assert state == "COMPLETED", output
    directory = tmp_path / "job"
    joined = [line.split() for line in (directory / "nodes" / "joined").read_text().splitlines()]
    assert [line[0] for line in joined] == ["node1", "node2"]
    records = read_metrics(directory / "run")
    assert [record["step"] for record in records] == [1, 2]
    assert max(record["train/token_mult_prob_error"] for record in records) < 1.001
    assert {"driver", "engine", "policy_worker-0", "policy_worker-1"} <= {
        path.stem for path in (directory / "run" / "logs").iterdir()
    } | {"driver"}
    for node in ("node1", "node2"):
        assert "Ray runtime started" in (directory / "nodes" / f"{node}.log").read_text()
        assert list((directory / "nodes" / f"{node}-ray").glob("raylet*"))
    assert f"run_dir: {directory / 'run'}" in output


# Tells which task of an array it is, by a name in its own Ray, then waits to be told to save.
ARRAY_ENTRY = """
import os, pathlib, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
import ray
ray.init(log_to_driver=False, namespace="test")

@ray.remote(num_cpus=0)
class Task:
    pass

task = Task.options(name="task-" + os.environ["SLURM_ARRAY_TASK_ID"]).remote()
ray.get(task.__ray_ready__.remote())
(pathlib.Path(os.environ["JOB_DIR"]) / "ready").touch()
signal.sigwait({signal.SIGUSR1})
"""
NAMED_ACTORS = """
import ray
ray.init(log_to_driver=False)
print("actors:", *(actor["name"] for actor in ray.util.list_named_actors(all_namespaces=True)))
"""


@pytest.mark.whole_run
def test_tasks_of_an_array_share_a_node_and_are_attached_to_one_by_one(
    slurm: Slurm, environment: dict[str, str], tmp_path: Path
) -> None:
    entry = tmp_path / "entry.py"
    entry.write_text(ARRAY_ENTRY)
    array = ["--array=1-2", "--nodelist=node1", SCRIPT]
    job = sbatch(slurm, tmp_path, array, {**environment, "ENTRY": str(entry)})
    tasks = [tmp_path / "job" / task for task in ("1", "2")]
    wait_for(slurm, job, lambda: all((task / "ready").exists() for task in tasks), tmp_path)
    joined = [(task / "nodes" / "joined").read_text().split() for task in tasks]
    assert [line[0] for line in joined] == ["node1", "node1"] and joined[0][2] != joined[1][2]

    def attach(name: str) -> tuple[int, str]:
        command = ("scripts/slurm/attach.sh", name, "--", "python", "-c", NAMED_ACTORS)
        done = slurm.run(*command, timeout_s=120, **environment)
        return done.returncode, done.stdout + done.stderr

    assert "actors: task-2" in attach(f"{job}_2")[1].splitlines()
    tasks_that_run = f"name one of the tasks that run: {job}_1 {job}_2"
    assert attach(job) == (1, f"attach: job {job} is an array; {tasks_that_run}\n")
    for task in ("1", "2"):
        assert slurm.run("scancel", "--signal=USR1", f"{job}_{task}").returncode == 0
        assert ends(slurm, f"{job}_{task}", tmp_path)[0] == "COMPLETED"
        # The other one was not told.
        assert (slurm.job(f"{job}_2")["JobState"] == "RUNNING") == (task == "1")


ENTRY = """
import os, pathlib, signal, sys
directory = pathlib.Path(os.environ["JOB_DIR"])
attempt = os.environ.get("SLURM_RESTART_COUNT", "0")
(directory / f"attempt-{attempt}").write_text(os.environ["RAY_ADDRESS"])
if attempt == "0":
    signal.sigwait({signal.SIGUSR1})
    sys.exit(75)
"""


@pytest.mark.slow
@pytest.mark.whole_run
def test_a_message_to_save_requeues_the_job_and_the_second_attempt_ends_it(
    slurm: Slurm, environment: dict[str, str], tmp_path: Path
) -> None:
    entry = tmp_path / "entry.py"
    entry.write_text("import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})\n" + ENTRY)
    job = sbatch(slurm, tmp_path, ["--nodes=1", SCRIPT], {**environment, "ENTRY": str(entry)})
    first, second = tmp_path / "job" / "attempt-0", tmp_path / "job" / "attempt-1"
    wait_for(slurm, job, first.exists, tmp_path)
    assert slurm.run("scancel", "--signal=USR1", job).returncode == 0
    wait_for(slurm, job, second.exists, tmp_path, timeout_s=180)
    state, output = ends(slurm, job, tmp_path)
    assert state == "COMPLETED", output
    assert "it has saved and has more to do: queued again" in output


@pytest.mark.slow
@pytest.mark.whole_run
@pytest.mark.timeout(600)
def test_a_job_told_to_save_continues_when_it_is_queued_again_and_ends_as_one_never_interrupted(
    slurm: Slurm, environment: dict[str, str], arithmetic_model: str, tmp_path: Path
) -> None:
    overrides = [
        *("grpo.max_num_steps=8", "grpo.num_prompts_per_step=32", "generation.num_engines=1"),
        *("grpo.val_at_start=false", "grpo.val_at_end=false", "policy.scheduler.decay_style=constant"),
    ]
    run_dir, output = tmp_path / "job" / "run", tmp_path / "slurm.out"
    job = sbatch(slurm, tmp_path, ["--nodes=2", SCRIPT, "--config", CONFIG, SCORED, *overrides], environment)

    def has_made_two_steps() -> bool:
        return (run_dir / "metrics.jsonl").is_file() and len(read_metrics(run_dir)) >= 2

    wait_for(slurm, job, has_made_two_steps, tmp_path, timeout_s=150)
    assert slurm.run("scancel", "--signal=USR1", job).returncode == 0
    wait_for(slurm, job, lambda: "continuing after step" in output.read_text(), tmp_path, timeout_s=200)
    state, text = ends(slurm, job, tmp_path)
    assert state == "COMPLETED", text
    assert re.search(r"received SIGUSR1\. Step \d+ is saved\. The same command continues it", text)
    assert "run_grpo.py exited with code 75" in text
    undisturbed = run_grpo(tmp_path / "alone", overrides)
    assert undisturbed.returncode == 0, undisturbed.output
    records = [without_measurements(record) for record in read_metrics(run_dir)]
    assert records == [without_measurements(record) for record in undisturbed.records()]


@pytest.mark.slow
@pytest.mark.whole_run
def test_a_shell_can_be_attached_to_a_job_that_only_runs_ray(
    slurm: Slurm, environment: dict[str, str], tmp_path: Path
) -> None:
    job = sbatch(slurm, tmp_path, ["--nodes=1", SCRIPT], {**environment, "INTERACTIVE": "1"})
    output = tmp_path / "slurm.out"
    wait_for(slurm, job, lambda: output.exists() and "attach with" in output.read_text(), tmp_path)
    ask = "import json, os, ray; ray.init(log_to_driver=False); print(json.dumps(ray.cluster_resources()))"
    done = slurm.run("scripts/slurm/attach.sh", job, "--", "python", "-c", ask, timeout_s=120, **environment)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["CPU"] == 4
    slurm.run("scancel", "--full", job)
    state, _ = ends(slurm, job, tmp_path)
    assert state == "CANCELLED"
