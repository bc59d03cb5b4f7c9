"""Real Ray processes: calls, failures, deaths and deadlines."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from nemo_like.cluster.actor_errors import ActorDied, ActorFailed, StageTimeout
from nemo_like.cluster.actors import ActorSpec, Concurrency
from nemo_like.cluster.cluster import Cluster
from nemo_like.observability.bounded_log import MAX_BYTES

WORKER = "tests.functional.test_cluster:Worker"


class Worker:
    """A plain class, as users write them."""

    def __init__(self, fails: str = "") -> None:
        if fails:
            raise RuntimeError(fails)

    def pid(self) -> int:
        return os.getpid()

    def flood(self, num_mib: int) -> None:
        for _ in range(num_mib):
            print("x" * (2**20 - 1))
        print("the end", flush=True)

    def interpreter(self) -> str:
        return sys.executable

    def thread(self) -> int:
        return threading.get_ident()

    def shout(self, text: str) -> str:
        print(text, flush=True)
        return text.upper()

    def fail(self) -> None:
        raise KeyError("no such prompt")

    def lose_its_peer(self) -> None:
        raise ConnectionResetError("connection closed by peer")

    def hang(self) -> None:
        threading.Event().wait(60)


class AsyncWorker:
    """Two coroutines that can only finish by interleaving."""

    def __init__(self) -> None:
        self._released = asyncio.Event()

    async def fail(self) -> None:
        raise KeyError("no such prompt")

    async def wait(self) -> str:
        await self._released.wait()
        return "released"

    def release(self) -> None:
        self._released.set()


@pytest.fixture
def cluster(private_ray: None) -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.stop()


def test_a_private_ray_has_no_process_that_serves_nobody(private_ray: None) -> None:
    commands = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    assert any("raylet" in command for command in commands)
    for needless in ("dashboard.py", "monitor.py", "ray::IDLE"):
        assert not any(needless in command for command in commands)


def test_calls_return_in_order_and_output_goes_to_the_log(cluster: Cluster, tmp_path) -> None:
    log = tmp_path / "logs" / "worker.log"
    worker = cluster.start(ActorSpec("worker", WORKER, log_path=str(log)))
    calls = [worker.submit("shout", text) for text in ("one", "two")]
    assert cluster.gather(calls, stage="shouting", timeout_s=60) == ["ONE", "TWO"]
    assert log.read_text() == "one\ntwo\n"


def test_an_actor_that_prints_without_end_leaves_the_beginning_and_the_end(
    cluster: Cluster, tmp_path: Path
) -> None:
    log = tmp_path / "worker.log"
    worker = cluster.start(ActorSpec("worker", WORKER, log_path=str(log)))
    calls = [worker.submit("shout", "the beginning"), worker.submit("flood", 96)]
    cluster.gather(calls, stage="shouting", timeout_s=60)
    deadline = time.monotonic() + 30
    # It may be read in the middle of a cut.
    while len(content := log.read_bytes()) > MAX_BYTES or not content.endswith(b"\nthe end\n"):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert content.startswith(b"the beginning\n")
    assert b" bytes were left out here ---\n" in content


def test_an_interpreter_whose_path_has_a_space_and_a_quote_is_started(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my project's").symlink_to(sys.prefix)
    interpreter = str(tmp_path / "my project's" / "bin" / "python")
    monkeypatch.setattr(sys, "executable", interpreter)
    worker = cluster.start(ActorSpec("worker", WORKER))
    assert cluster.gather([worker.submit("interpreter")], stage="start", timeout_s=60) == [interpreter]


def test_a_serial_actor_works_on_one_thread(cluster: Cluster) -> None:
    worker = cluster.start(ActorSpec("worker", WORKER))
    threads = cluster.gather([worker.submit("thread") for _ in range(8)], stage="threads", timeout_s=60)
    assert len(set(threads)) == 1


def test_coroutines_of_an_asyncio_actor_interleave(cluster: Cluster) -> None:
    target = "tests.functional.test_cluster:AsyncWorker"
    worker = cluster.start(ActorSpec("worker", target, concurrency=Concurrency.asyncio))
    calls = [worker.submit("wait"), worker.submit("release")]
    assert cluster.gather(calls, stage="interleaving", timeout_s=60) == ["released", None]


def test_a_remote_error_names_actor_method_and_stage(cluster: Cluster) -> None:
    worker = cluster.start(ActorSpec("worker-3", WORKER))
    with pytest.raises(ActorFailed, match=r"worker-3.fail failed during stage 'rewarding'.*no such prompt"):
        cluster.gather([worker.submit("fail")], stage="rewarding", timeout_s=60)


@pytest.mark.parametrize("concurrency", list(Concurrency))
def test_the_log_of_an_actor_has_the_stack_of_its_error(
    cluster: Cluster, tmp_path, concurrency: Concurrency
) -> None:
    log = tmp_path / "worker.log"
    target = WORKER if concurrency is Concurrency.serial else "tests.functional.test_cluster:AsyncWorker"
    worker = cluster.start(ActorSpec("worker", target, concurrency=concurrency, log_path=str(log)))
    with pytest.raises(ActorFailed, match="no such prompt"):
        cluster.gather([worker.submit("fail")], stage="rewarding", timeout_s=60)
    stack = log.read_text()
    assert ", in fail\n" in stack
    assert stack.endswith("KeyError: 'no such prompt'\n")


@pytest.mark.timeout(120)
def test_an_error_that_no_death_causes_is_told_at_once(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("nemo_like.cluster.cluster._CAUSE_GRACE_S", 1000.0)
    worker = cluster.start(ActorSpec("worker", WORKER))
    with pytest.raises(ActorFailed, match="no such prompt"):
        cluster.gather([worker.submit("fail")], stage="rewarding", timeout_s=60)


def test_a_failing_constructor_is_reported_with_its_message(cluster: Cluster) -> None:
    worker = cluster.start(ActorSpec("worker", WORKER, kwargs={"fails": "no checkpoint here"}))
    with pytest.raises(ActorFailed, match="no checkpoint here"):
        cluster.gather([worker.submit("pid")], stage="start", timeout_s=60)


def test_the_death_of_any_actor_ends_the_wait_for_another(cluster: Cluster) -> None:
    busy = cluster.start(ActorSpec("busy", WORKER))
    victim = cluster.start(ActorSpec("victim", WORKER))
    (pid,) = cluster.gather([victim.submit("pid")], stage="start", timeout_s=60)
    call = busy.submit("hang")
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorDied, match="'victim' died during stage 'policy_training'"):
        cluster.gather([call], stage="policy_training", timeout_s=30)


def test_a_failure_is_put_down_to_the_death_that_follows_it_by_seconds(cluster: Cluster) -> None:
    victim, sender = (cluster.start(ActorSpec(name, WORKER)) for name in ("victim", "sender"))
    [pid, _] = cluster.gather([victim.process_id(), sender.process_id()], stage="start", timeout_s=60)
    dying = threading.Timer(4.0, os.kill, (pid, signal.SIGKILL))
    dying.start()
    with pytest.raises(ActorDied, match="actor 'victim' died"):
        cluster.gather([sender.submit("lose_its_peer")], stage="sending", timeout_s=60)
    dying.join()


@pytest.mark.parametrize("concurrency", Concurrency)
def test_an_actor_that_is_asked_to_end_does_so_in_the_middle_of_its_calls(
    concurrency: Concurrency, cluster: Cluster
) -> None:
    target = f"{__name__}:{'AsyncWorker' if concurrency is Concurrency.asyncio else 'Worker'}"
    worker = cluster.start(ActorSpec("worker", target, concurrency=concurrency))
    [pid] = cluster.gather([worker.process_id()], stage="start", timeout_s=60)
    call = worker.submit("wait" if concurrency is Concurrency.asyncio else "hang")
    os.kill(pid, signal.SIGTERM)
    with pytest.raises(ActorDied):
        cluster.gather([call], stage="generation", timeout_s=20)


def test_a_wait_outlives_actors_it_does_not_need_and_a_successor_takes_their_name(cluster: Cluster) -> None:
    needed, victim = (cluster.start(ActorSpec(name, WORKER)) for name in ("needed", "victim"))
    (pid,) = cluster.gather([victim.submit("pid")], stage="start", timeout_s=60)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(ActorDied, match="'victim'"):
        cluster.gather([victim.submit("pid")], stage="generation", timeout_s=30)
    assert cluster.dead() == ["victim"]
    call = needed.submit("shout", "training")
    assert cluster.gather([call], stage="training", timeout_s=30, watching=[needed]) == ["TRAINING"]

    cluster.discard(victim)
    successor = cluster.start(ActorSpec("victim", WORKER))
    assert cluster.gather([successor.submit("shout", "again")], stage="start", timeout_s=60) == ["AGAIN"]
    assert cluster.dead() == []


def test_a_deadline_names_who_has_not_answered(cluster: Cluster) -> None:
    workers = [cluster.start(ActorSpec(f"worker-{i}", WORKER)) for i in range(2)]
    calls = [workers[0].submit("pid"), workers[1].submit("hang")]
    cluster.gather([worker.submit("pid") for worker in workers[:1]], stage="start", timeout_s=60)
    with pytest.raises(
        StageTimeout, match=r"'logprobs' did not finish within 3 s; still waiting for worker-1"
    ):
        cluster.gather(calls, stage="logprobs", timeout_s=3)
