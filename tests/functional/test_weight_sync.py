"""Trainer stages push weights into real engines through named groups; the engines' log-probs tell."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import pytest

from nemo_like.cluster.actor_errors import ActorBroken, ActorFailed
from nemo_like.cluster.actors import ActorHandle, Call
from nemo_like.cluster.cluster import Cluster
from nemo_like.config.schema import WeightTransport
from nemo_like.config.tasks import SamplingSettings
from nemo_like.generation.interface import GroupRequest, GroupResult
from nemo_like.observability.metrics import Metric, merge
from nemo_like.weight_sync.sync import EngineWeights
from tests.functional.generation_fixtures import (
    TIMEOUT_S,
    collector_spec,
    engine_spec,
    make_checkpoint,
    stage_spec,
)

# The first test of a module also waits for its engines.
pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("nobody_dies")]

# Two blocks of the KV cache and more: keys and values that outlive an update would show.
PROMPT = tuple(2 + (7 * i) % 60 for i in range(70))


@dataclass
class Setup:
    """Trainer stages, engines and a sink, connected."""

    cluster: Cluster
    engines: list[ActorHandle]
    stages: list[ActorHandle]
    sink: ActorHandle

    def all(self, calls: Sequence[Call]) -> list:
        return self.cluster.gather(calls, stage="test", timeout_s=TIMEOUT_S)

    def connect(self) -> None:
        """Connect every stage to all engines, anew if need be."""
        self.all([stage.submit("connect", self.engines) for stage in self.stages])

    def update(self, seed: int) -> None:
        """One optimizer step's worth of change, the same in every stage."""
        self.all([stage.submit("update", seed) for stage in self.stages])

    def version(self) -> int:
        """What every engine serves."""
        found = {stats.policy_version for stats in self.all([one.submit("stats") for one in self.engines])}
        (version,) = found
        return version

    def push(self, version: int) -> dict[str, Metric]:
        return merge(self.all([stage.submit("push_weights", version) for stage in self.stages]))

    def submit(self, name: str, max_new_tokens: int = 8) -> list[str]:
        """One group on every engine; returns the request ids."""
        sampling = SamplingSettings(1.0, 1.0, 0, max_new_tokens, ())
        ids = [f"{name}/{engine.name}" for engine in self.engines]
        self.all(
            [
                engine.submit("submit", [GroupRequest(id_, PROMPT, tuple(range(4)))], sampling, self.sink)
                for engine, id_ in zip(self.engines, ids, strict=True)
            ]
        )
        return ids

    def generate(self, name: str) -> list[GroupResult]:
        [results] = self.all([self.sink.submit("wait_for", self.submit(name), TIMEOUT_S)])
        return results

    def logprob_error(self, results: Sequence[GroupResult]) -> float:
        """Largest difference in nats between what an engine sampled with and the trainer's own log-probs."""
        errors = []
        for result in results:
            token_ids = [response.token_ids for response in result.responses]
            [expected] = self.all([self.stages[0].submit("logprobs", PROMPT, token_ids)])
            errors += [
                np.abs(response.logprobs - own).max()
                for response, own in zip(result.responses, expected, strict=True)
            ]
        return float(max(errors))


def start(
    checkpoint: Path,
    prefix: str,
    transport: WeightTransport,
    *,
    num_engines: int = 1,
    num_stages: int = 1,
    tensor_parallel_size: int = 1,
) -> Setup:
    cluster = Cluster()
    engines = [
        cluster.start(
            engine_spec(checkpoint, f"{prefix}-engine-{i}", tensor_parallel_size=tensor_parallel_size)
        )
        for i in range(num_engines)
    ]
    stages = [
        cluster.start(stage_spec(checkpoint, f"{prefix}-trainer", stage, num_stages, transport))
        for stage in range(num_stages)
    ]
    setup = Setup(cluster, engines, stages, cluster.start(collector_spec(f"{prefix}-collector")))
    setup.connect()
    return setup


@pytest.fixture(scope="module")
def shared(private_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    """Two engines, a trainer of two pipeline stages, tied embeddings; through shared memory."""
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("tied"), tied=True)
    setup = start(checkpoint, "tied", WeightTransport.auto, num_engines=2, num_stages=2)
    yield setup
    setup.cluster.stop()


@pytest.fixture(scope="module")
def broadcast(shared: Setup) -> Setup:
    """The same engines and stages, by broadcast from now on."""
    shared.all([stage.submit("send_by", WeightTransport.collective) for stage in shared.stages])
    shared.connect()
    return shared


@pytest.fixture(scope="module")
def tensor_parallel(private_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    """One engine over two tensor-parallel workers, two trainer stages, an untied output layer; broadcast."""
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("untied"), tied=False)
    setup = start(checkpoint, "untied", WeightTransport.collective, num_stages=2, tensor_parallel_size=2)
    yield setup
    setup.cluster.stop()


@pytest.fixture(scope="module")
def experts(private_ray: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    """One engine and a trainer of two stages, mixture of experts; through shared memory."""
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("experts"), tied=False, num_experts=4)
    setup = start(checkpoint, "experts", WeightTransport.shared_memory, num_stages=2)
    yield setup
    setup.cluster.stop()


@pytest.mark.slow
def test_every_expert_arrives(experts: Setup) -> None:
    for version in (0, 1):
        experts.update(version)
        experts.push(version)
        assert experts.logprob_error(experts.generate(f"experts-v{version}")) < 1e-4


def test_every_engine_samples_from_the_trainers_new_weights(shared: Setup) -> None:
    sync = EngineWeights(shared.push)
    sync.ensure_version(0)
    assert shared.logprob_error(shared.generate("v0")) < 1e-4
    for version in (1, 2):
        shared.update(version)
        # The update is large enough to be seen if it did not arrive.
        assert shared.logprob_error(shared.generate(f"before-{version}")) > 1e-2
        metrics = sync.ensure_version(version)
        assert metrics["weight_sync_bytes"].value > 0
        results = shared.generate(f"v{version}")
        assert {result.policy_version for result in results} == {version}
        assert {result.weights_digest for result in results} == {sync.digest}
        assert len(results) == 2
        assert shared.logprob_error(results) < 1e-4


def check_that_a_stage_that_cannot_send_spoils_nothing(shared: Setup) -> None:
    """No engine has loaded anything when the failure shows, so the next transfer finds all of them whole."""
    version = shared.version() + 1
    shared.push(version)
    before = shared.generate("in-force")
    shared.update(version + 1)
    for spoiling_stage, name in ((1, "model.norm.weight"), (0, "model.embed_tokens.weight")):
        shared.all([shared.stages[spoiling_stage].submit("spoil", name)])
        pushes = [stage.submit("push_weights", version + 1) for stage in shared.stages]
        with pytest.raises(ActorFailed) as caught:
            shared.all(pushes[:1])
        message = str(caught.value)
        assert f"policy version {version + 1} was not transferred" in message
        for engine in shared.engines:
            assert f"{engine.name} serves version {version}" in message
        with contextlib.suppress(ActorFailed):
            shared.all(pushes[1:])
        shared.all([shared.stages[spoiling_stage].submit("spoil", None)])
        for result, expected in zip(shared.generate(f"spoilt-{name}"), before, strict=True):
            assert result.policy_version == version
            for response, same in zip(result.responses, expected.responses, strict=True):
                np.testing.assert_allclose(response.logprobs, same.logprobs, atol=1e-5)
    shared.push(version + 1)
    results = shared.generate("after-spoilt")
    assert {result.policy_version for result in results} == {version + 1}
    assert shared.logprob_error(results) < 1e-4


def test_a_stage_that_cannot_send_leaves_every_engine_at_the_version_in_force(shared: Setup) -> None:
    check_that_a_stage_that_cannot_send_spoils_nothing(shared)


def test_a_broadcast_reaches_every_engine(broadcast: Setup) -> None:
    first = broadcast.version() + 1
    for version in (first, first + 1):
        broadcast.update(version)
        broadcast.push(version)
        assert broadcast.logprob_error(broadcast.generate(f"broadcast-v{version}")) < 1e-4


def test_an_older_version_is_refused_and_changes_nothing_and_the_same_may_come_again(
    broadcast: Setup,
) -> None:
    version = broadcast.version() + 1
    broadcast.push(version)
    with pytest.raises(ActorFailed, match=f"version={version - 1} is older"):
        broadcast.push(version - 1)
    for name in ("stale-after", "same-again"):
        results = broadcast.generate(name)
        assert {result.policy_version for result in results} == {version}
        assert broadcast.logprob_error(results) < 1e-4
        broadcast.push(version)


def test_weights_do_not_change_under_a_group_that_is_being_generated(broadcast: Setup) -> None:
    version = broadcast.version()
    ids = broadcast.submit("in-flight", max_new_tokens=24)
    with pytest.raises(ActorFailed, match="still generates 1 groups"):
        broadcast.push(version + 1)
    [results] = broadcast.all([broadcast.sink.submit("wait_for", ids, TIMEOUT_S)])
    assert {result.policy_version for result in results} == {version}
    broadcast.push(version + 1)
    assert {result.policy_version for result in broadcast.generate("after-flight")} == {version + 1}


def test_requests_that_arrive_during_an_update_are_sampled_with_the_new_version(broadcast: Setup) -> None:
    version = broadcast.version() + 1
    broadcast.all([engine.submit("pause", version) for engine in broadcast.engines])
    ids = broadcast.submit("while-paused")
    broadcast.update(version)
    broadcast.push(version)
    [results] = broadcast.all([broadcast.sink.submit("wait_for", ids, TIMEOUT_S)])
    assert {result.policy_version for result in results} == {version}
    assert broadcast.logprob_error(results) < 1e-4


def test_a_model_that_is_sent_incompletely_ends_the_engine(broadcast: Setup) -> None:
    """Last, since it ends the engines. A trainer can connect anew, but not with weights missing."""
    version = broadcast.version() + 1
    broadcast.all([broadcast.stages[1].submit("forget", "model.norm.weight")])
    broadcast.connect()
    with pytest.raises(
        ActorBroken,
        match=r"'tied-engine-\d' failed during .* broke off: .*sent no weights for \['model.norm.weight'\]",
    ):
        broadcast.push(version)
    with pytest.raises(ActorBroken, match=r"actor 'tied-engine-\d' failed"):
        broadcast.submit("after-failure")


@pytest.mark.slow
def test_tensor_parallel_workers_get_their_shards(tensor_parallel: Setup) -> None:
    for version in (0, 1):
        tensor_parallel.update(version)
        tensor_parallel.push(version)
        assert tensor_parallel.logprob_error(tensor_parallel.generate(f"tp-v{version}")) < 1e-4


@pytest.mark.slow
def test_a_stage_that_cannot_send_leaves_an_engine_of_two_workers_at_the_version_in_force(
    tensor_parallel: Setup,
) -> None:
    """Both of its workers hear of it, and the next call gets its own answers."""
    tensor_parallel.all(
        [stage.submit("send_by", WeightTransport.shared_memory) for stage in tensor_parallel.stages]
    )
    tensor_parallel.connect()
    tensor_parallel.push(tensor_parallel.version() + 1)
    check_that_a_stage_that_cannot_send_spoils_nothing(tensor_parallel)


@pytest.mark.slow
def test_an_engine_goes_with_any_of_its_worker_processes(tensor_parallel: Setup) -> None:
    """The last of the engine, which it ends."""
    [engine] = tensor_parallel.engines
    pid = engine.process_id().result(TIMEOUT_S)
    workers = [child for child in psutil.Process(pid).children() if "Worker" in child.cmdline()[0]]
    workers[0].kill()
    _, alive = psutil.wait_procs([psutil.Process(pid)], timeout=TIMEOUT_S)
    assert not alive
