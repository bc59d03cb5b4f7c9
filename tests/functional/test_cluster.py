"""Real Ray processes: calls, failures, deaths and deadlines."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from nemo_like.cluster.actor_errors import ActorDied, ActorFailed, StageTimeout
from nemo_like.cluster.actors import ActorHandle, ActorSpec, Concurrency
from nemo_like.cluster.cluster import Cluster
from nemo_like.observability.bounded_log import MAX_BYTES

WORKER = "tests.functional.test_cluster:Worker"
ASYNC_WORKER = "tests.functional.test_cluster:AsyncWorker"


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


@dataclass(frozen=True)
class Running:
    """An actor for the tests that leave it as it was."""

    cluster: Cluster
    handle: ActorHandle
    log: Path

    def gather(self, *calls: tuple[str, ...], stage: str) -> list[Any]:
        """Make these calls, each a method and its arguments, and wait for all of them."""
        submitted = [self.handle.submit(*call) for call in calls]
        return self.cluster.gather(submitted, stage=stage, timeout_s=60)


Actors = dict[Concurrency, Running]


@pytest.fixture(scope="module")
def running(private_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Actors]:
    """One actor of each kind."""
    cluster, folder = Cluster(), tmp_path_factory.mktemp("logs")
    targets = {Concurrency.serial: WORKER, Concurrency.asyncio: ASYNC_WORKER}
    actors = {}
    for concurrency, target in targets.items():
        log = folder / f"{concurrency.value}.log"
        spec = ActorSpec(f"a {concurrency.value} one", target, concurrency=concurrency, log_path=str(log))
        actors[concurrency] = Running(cluster, cluster.start(spec), log)
    yield actors
    cluster.stop()


def test_a_private_ray_has_no_process_that_serves_nobody(private_ray: None) -> None:
    commands = [" ".join(child.cmdline()) for child in psutil.Process().children(recursive=True)]
    assert any("raylet" in command for command in commands)
    # The raylet's own command has the command that starts it.
    started = [command for command in commands if "--dashboard_agent_command" not in command]
    for needless in ("dashboard.py", "dashboard/agent.py", "monitor.py", "ray::IDLE"):
        assert not any(needless in command for command in started)
    assert sum("absent_agent.py" in command for command in started) == 1


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


def test_a_serial_actor_works_on_one_thread(running: Actors) -> None:
    threads = running[Concurrency.serial].gather(*[("thread",)] * 8, stage="threads")
    assert len(set(threads)) == 1


def test_coroutines_of_an_asyncio_actor_interleave(running: Actors) -> None:
    answers = running[Concurrency.asyncio].gather(("wait",), ("release",), stage="interleaving")
    assert answers == ["released", None]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("concurrency", list(Concurrency))
def test_a_remote_error_names_actor_method_and_stage_at_once_and_its_stack_is_in_the_log(
    running: Actors, concurrency: Concurrency, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, since no death can have caused it."""
    monkeypatch.setattr("nemo_like.cluster.cluster._CAUSE_GRACE_S", 1000.0)
    actor = running[concurrency]
    message = rf"a {concurrency.value} one.fail failed during stage 'rewarding'.*no such prompt"
    with pytest.raises(ActorFailed, match=message):
        actor.gather(("fail",), stage="rewarding")
    stack = actor.log.read_text()
    assert ", in fail\n" in stack
    assert stack.endswith("KeyError: 'no such prompt'\n")


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
    target = ASYNC_WORKER if concurrency is Concurrency.asyncio else WORKER
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
