"""The environment in its own process, called as the rollout actor calls it."""

from __future__ import annotations

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


@pytest.fixture(scope="module")
def environment(cluster, tmp_path_factory):
    cfg = env_config("arithmetic")
    return cluster.start(
        ActorSpec(
            name="environment/0",
            target="nemo_like.environments.server:EnvironmentServer",
            kwargs={"name": "arithmetic", "cfg": cfg},
            num_cpus=0,
            concurrency=Concurrency.asyncio,
            log_path=str(tmp_path_factory.mktemp("logs") / "environment-0.log"),
        )
    )


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
