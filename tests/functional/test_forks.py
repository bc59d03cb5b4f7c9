"""Forks of the fork server as workers of Ray."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import psutil
import pytest
import ray

from nemo_like.cluster.actors import runtime_env
from nemo_like.cluster.fork_server import ForkServer, Imports
from nemo_like.cluster.runtime import RayNeeds, ray_runtime
from nemo_like.compat.worker_start import MAY_BE_FORKED
from nemo_like.configuration import load_config
from nemo_like.driver.run_forks import fork_server, torch_environment

DEMO = "configs/grpo_arithmetic_cpu.yaml"
SMALL = ForkServer([Imports(["ray", "poplib"])], {})


class Caller:
    """Draws ids as an engine does, which calls the rollout actor on a thread of its own."""

    def parent(self) -> int:
        return os.getppid()

    def loaded(self) -> list[str]:
        return sorted(sys.modules)

    def drawn(self) -> list[str]:
        """Return ids that Ray draws on a first thread, on a second one and on the actor's own."""
        ids: list[str] = []

        def draw() -> None:
            ids.append(ray.put(0).hex())

        for _ in range(2):
            thread = threading.Thread(target=draw)
            thread.start()
            thread.join()
        draw()
        return ids


def needs(server: ForkServer) -> RayNeeds:
    return RayNeeds(address=None, num_cpus=8, num_gpus=0, start_timeout_s=120, fork_server=server)


def callers(environment: dict[str, str], count: int = 2) -> list:
    described = runtime_env(environment | MAY_BE_FORKED)
    return [ray.remote(Caller).options(num_cpus=0, runtime_env=described).remote() for _ in range(count)]


def server_process() -> psutil.Process:
    for process in psutil.Process().children(recursive=True):
        if "fork_server" in " ".join(process.cmdline()) and not process.name().startswith("ray::"):
            return process
    pytest.fail("there is no fork server")


@pytest.fixture
def small() -> Iterator[None]:
    with ray_runtime(needs(SMALL), warn=print):
        yield


def all_drawn(actors: list) -> list[str]:
    return [one for ids in ray.get([actor.drawn.remote() for actor in actors], timeout=250) for one in ids]


def test_forks_draw_different_ids(small: None) -> None:
    actors = callers({}, 3)
    drawn = all_drawn(actors)
    assert len(set(drawn)) == len(drawn) == 9
    assert set(ray.get([one.parent.remote() for one in actors], timeout=60)) == {server_process().pid}
    assert "poplib" in ray.get(actors[0].loaded.remote(), timeout=60)


def test_forks_live_on_when_the_server_is_killed_and_others_start_without_it(small: None) -> None:
    (fork,) = callers({}, 1)
    server = server_process()
    assert ray.get(fork.parent.remote(), timeout=60) == server.pid
    server.kill()
    (other,) = callers({}, 1)
    assert ray.get(other.parent.remote(), timeout=60) != server.pid
    assert "poplib" not in ray.get(other.loaded.remote(), timeout=60)
    assert len(ray.get(fork.drawn.remote(), timeout=60)) == 3


def test_nothing_is_left_of_a_ray_whose_raylet_is_killed() -> None:
    with ray_runtime(needs(SMALL), warn=print):
        (fork,) = callers({}, 1)
        ray.get(fork.parent.remote(), timeout=60)
        server = server_process()
        started = [server, *server.children()]
        assert len(started) == 2
        (raylet,) = (one for one in psutil.Process().children() if one.name() == "raylet")
        raylet.kill()
    assert not [one for one in started if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]


def test_the_forks_of_a_run_draw_different_ids() -> None:
    """What the server of a run imports draws none before, nor starts a thread, after which it would fork
    nothing."""
    cfg = load_config(DEMO, [])
    server = fork_server(cfg)
    assert server is not None
    with ray_runtime(needs(server), warn=print):
        actors = callers(torch_environment(cfg))
        drawn = all_drawn(actors)
        assert len(set(drawn)) == len(drawn) == 6
        loaded = ray.get(actors[0].loaded.remote(), timeout=60)
    modules = {module for block in server.imports for module in block.modules}
    assert modules <= set(loaded)
    assert not {"scipy", "sklearn", "wandb", "mooncake", "transfer_queue"} & set(loaded)


def test_a_run_on_gpus_or_below_another_ray_has_no_fork_server() -> None:
    assert fork_server(load_config(DEMO, ["policy.device=cuda"])) is None
    assert fork_server(load_config(DEMO, ["cluster.address=auto"])) is None
