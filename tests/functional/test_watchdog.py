"""Actors that hang: the report of a missed deadline says who, where in the code, and nothing is left."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from nemo_like.cluster import stacks
from nemo_like.cluster.actor_errors import StageTimeout
from nemo_like.cluster.actors import ActorHandle, ActorSpec
from nemo_like.cluster.cluster import Cluster
from tests.functional.runs import read_metrics, running, wait_for_step, wait_until_gone

SLEEPER = "tests.functional.sleeper:Sleeper"

pytestmark = pytest.mark.usefixtures("private_ray", "nobody_dies")


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(report_directory=tmp_path / "logs")


@pytest.fixture
def start(cluster: Cluster, tmp_path: Path) -> Callable[[str], tuple[ActorHandle, psutil.Process]]:
    """Starts an actor with a log; the handle and the process."""

    def started(name: str) -> tuple[ActorHandle, psutil.Process]:
        handle = cluster.start(ActorSpec(name, SLEEPER, log_path=str(tmp_path / "logs" / f"{name}.log")))
        (pid,) = cluster.gather([handle.submit("pid")], stage="start", timeout_s=60)
        return handle, psutil.Process(pid)

    return started


@pytest.fixture(autouse=True)
def everything_ends(cluster: Cluster) -> None:
    yield
    cluster.stop()


def test_the_report_names_the_place_in_the_code_and_the_file_with_all_stacks(cluster, start) -> None:
    slow, process = start("slow")
    start("idle")
    call = slow.submit("fetch_from_nowhere")
    with pytest.raises(StageTimeout) as caught:
        cluster.gather([call], stage="policy.train", timeout_s=1)
    text = str(caught.value)
    assert "stage 'policy.train' did not finish within 1 s; still waiting for slow" in text
    # Its state is that of one moment: mostly sleeping, but Ray's own threads may be at work.
    assert re.search(rf"slow \(process {process.pid}, (sleeping|running|disk-sleep)\): ", text), text
    assert "Sleeper.fetch_from_nowhere (functional/sleeper.py:" in text
    assert "idle (process" not in text
    path = Path(text.rsplit("all stacks are in ")[1])
    assert path.name == "stacks-policy.train-1.txt"
    dumped = path.read_text()
    assert "fetch_from_nowhere" in dumped
    assert "idle: process" in dumped
    assert "py-spy found no" not in dumped


def test_a_stopped_process_is_said_to_be_stopped_and_ends_with_the_run(cluster, start) -> None:
    frozen, process = start("frozen")
    os.kill(process.pid, signal.SIGSTOP)
    call = frozen.submit("pid")
    with pytest.raises(StageTimeout, match=rf"frozen \(process {process.pid}, stopped\): \w+"):
        cluster.gather([call], stage="generation", timeout_s=1)
    cluster.stop()
    process.wait(timeout=20)


def test_where_looking_in_is_not_allowed_the_process_writes_its_stacks_itself(
    cluster, start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stacks, "_ask_py_spy", lambda pid: ((), "py-spy: Permission Denied"))
    slow, _ = start("slow")
    frozen, process = start("frozen")
    os.kill(process.pid, signal.SIGSTOP)
    calls = [slow.submit("fetch_from_nowhere"), frozen.submit("pid")]
    with pytest.raises(StageTimeout) as caught:
        cluster.gather(calls, stage="logprobs", timeout_s=1)
    text = str(caught.value)
    assert "fetch_from_nowhere (functional/sleeper.py:" in text
    assert "stopped): py-spy: Permission Denied; it did not write its stacks itself within 1 s" in text


def test_a_deadline_inside_an_actor_ends_the_stage_as_one_with_what_it_awaited(cluster, start) -> None:
    asking, _ = start("asking")
    other, _ = start("other")
    for call in (asking.submit("give_up"), asking.submit("ask", other)):
        with pytest.raises(StageTimeout) as caught:
            cluster.gather([call], stage="policy.train", timeout_s=30)
        text = str(caught.value)
        assert f"missed a deadline in asking.{call.method}: " in text
        assert "column 'prev_logprobs' of sample g3/1 is missing" in text
        assert "other (process" in text


RUN = [
    *("grpo.max_num_steps=5", "grpo.val_at_start=false", "grpo.val_at_end=false", "generation.num_engines=1"),
    *("checkpointing.save_period=2", "grpo.num_prompts_per_step=16"),
]


@pytest.mark.slow
@pytest.mark.whole_run
@pytest.mark.timeout(400)
def test_a_run_whose_environment_hangs_says_what_it_owes_and_starts_again(
    arithmetic_model: str, tmp_path: Path
) -> None:
    with running(tmp_path, [*RUN, "cluster.stage_timeouts_s.generation=12"]) as (process, mark, run_dir):
        wait_for_step(process, run_dir, step=2)
        pid = json.loads((run_dir / "processes.json").read_text())["environment"]
        os.kill(pid, signal.SIGSTOP)
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 0, output
        assert "stage 'generation' missed a deadline in rollout.next_part: rollout " in output
        assert "missing are, by prompt/sample, rewards 0/0, 0/1, " in output
        assert f"environment (process {pid}, stopped): " in output
        assert "starting all processes again (restart 1 of 2)" in output
        (report,) = (run_dir / "logs").glob("stacks-generation-*.txt")
        assert "policy_worker-1: process" in report.read_text()
        assert wait_until_gone(mark) == []
    assert [record["step"] for record in read_metrics(run_dir)] == [1, 2, 3, 4, 5]


@pytest.mark.slow
@pytest.mark.whole_run
@pytest.mark.timeout(400)
def test_a_run_whose_worker_hangs_stops_where_it_is_told_to(arithmetic_model: str, tmp_path: Path) -> None:
    stop = ["cluster.stage_timeout_s=15", "cluster.on_stage_timeout=stop"]
    with running(tmp_path, [*RUN, *stop]) as (process, mark, run_dir):
        wait_for_step(process, run_dir, step=2)
        pid = json.loads((run_dir / "processes.json").read_text())["policy_worker-1"]
        os.kill(pid, signal.SIGSTOP)
        output, _ = process.communicate(timeout=200)
        assert process.returncode == 1, output
        assert "did not finish within 15 s; still waiting for " in output
        assert f"policy_worker-1 (process {pid}, stopped): " in output
        assert "all stacks are in " in output
        assert wait_until_gone(mark) == []
