"""The environment in its own process, called as the rollout actor calls it."""

from __future__ import annotations

import psutil
import pytest

from nemo_like.cluster.actors import ActorSpec, Concurrency
from nemo_like.cluster.cluster import Cluster
from nemo_like.environments.interface import Turn
from tests.unit.environments.configs import env_config


@pytest.fixture(scope="module")
def cluster(private_ray):
    running = Cluster()
    yield running
    running.stop()


def start(cluster, cfg, folder, name="environment/0"):
    return cluster.start(
        ActorSpec(
            name=name,
            target="nemo_like.environments.server:EnvironmentServer",
            kwargs={"name": "task", "cfg": cfg},
            num_cpus=0,
            concurrency=Concurrency.asyncio,
            log_path=str(folder / "environment.log"),
        )
    )


@pytest.fixture(scope="module")
def environment(cluster, tmp_path_factory):
    return start(cluster, env_config("arithmetic"), tmp_path_factory.mktemp("logs"))


def turns(*responses):
    return [Turn(prompt="21+43=", response=r, answer="640", is_truncated=False) for r in responses]


def test_batches_of_groups_are_rewarded_in_order(cluster, environment):
    calls = [
        environment.submit("step", turns("640", "641", "640")),
        environment.submit("step", turns("000")),
    ]
    first, second = cluster.gather(calls, stage="reward", timeout_s=60.0)
    assert [feedback.reward for feedback in first] == [1.0, 0.0, 1.0]
    assert [feedback.reward for feedback in second] == [0.0]


def test_many_calls_interleave(cluster, environment):
    calls = [environment.submit("step", turns("640", "641")) for _ in range(50)]
    results = cluster.gather(calls, stage="reward", timeout_s=60.0)
    assert all([feedback.reward for feedback in result] == [1.0, 0.0] for result in results)


def test_what_rewards_started_in_sessions_of_their_own_ends_with_an_actor_that_ray_kills(cluster, tmp_path):
    options = {"target": "tests.functional.misbehaving:Parental"}
    parental = start(cluster, env_config("custom", options=options), tmp_path, name="environment/1")
    (feedback,) = cluster.gather(
        [parental.submit("step", turns("session", "orphan"))], stage="reward", timeout_s=60.0
    )
    started = [psutil.Process(int(item.reward)) for item in feedback]
    cluster.discard(parental)
    _, alive = psutil.wait_procs(started, 20.0)
    assert alive == []
