"""Trainer stages push weights into real engines through named groups; the engines' log-probs tell.

Besides whole weights: what changed of them, and adapters alone. The quick tests have the same processes, of
which the last ones end the engines.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from nemo_like.cluster.actor_errors import ActorBroken, ActorFailed
from nemo_like.generation.engine_spec import EngineAdapter
from nemo_like.generation.options import WeightTransport
from nemo_like.policy.options import Precision
from nemo_like.weight_sync.sync import EngineWeights
from tests.functional.generation_fixtures import TIMEOUT_S, make_checkpoint
from tests.functional.leftovers import workers_of
from tests.functional.weight_setup import PROMPT, Processes, Setup, start

# The first test also waits for the engines.
pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("nobody_dies")]


@pytest.fixture(scope="module")
def processes(ray_of_engines: None) -> Iterator[Processes]:
    """For one setup after the other, of engines of one worker which stay whole."""
    processes = Processes("shared")
    yield processes
    processes.stop()


@contextlib.contextmanager
def processes_for(transport: WeightTransport, shared: Processes, prefix: str) -> Iterator[Processes]:
    """Yield others for a broadcast, which ends an engine where it breaks off."""
    own = shared if transport is WeightTransport.shared_memory else Processes(prefix)
    try:
        yield own
    finally:
        if own is not shared:
            own.stop()


# What changed of the weights

# What AdamW moves a weight by at a learning rate of 1e-5; the weights are about 0.15.
LEARNING_RATE = 1e-5


@dataclass(frozen=True)
class Sending:
    """An engine and its trainer, and how many updates the test of many makes."""

    setup: Setup
    transport: WeightTransport
    num_updates: int


def push(setup: Setup, version: int) -> dict[str, float]:
    return {name: metric.value for name, metric in setup.push(version).items()}


def connect(setup: Setup, transport: WeightTransport, *, delta: bool) -> None:
    """Connect anew, to send what changed or everything."""
    setup.all([stage.submit("send_by", transport, delta) for stage in setup.stages])
    setup.connect()


def full_push(setup: Setup, transport: WeightTransport, version: int) -> dict[str, float]:
    """Push as a trainer does that always sends everything."""
    connect(setup, transport, delta=False)
    return push(setup, version)


def state(setup: Setup) -> tuple[str, list[float]]:
    """The digest of all that the engine's model holds, and the log-probs of a prompt."""
    [engine] = setup.engines
    [digest] = setup.all([engine.submit("model_digest")])
    [logprobs] = setup.all([engine.submit("canary_logprobs", PROMPT)])
    return digest, logprobs


@pytest.fixture(
    params=[
        (WeightTransport.shared_memory, 1, 8),
        pytest.param((WeightTransport.collective, 1, 50), marks=pytest.mark.slow),
        pytest.param((WeightTransport.collective, 2, 50), marks=pytest.mark.slow),
    ],
    ids=lambda case: f"{case[0].value}-tp{case[1]}",
    scope="module",
)
def sending(
    request: pytest.FixtureRequest, processes: Processes, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sending]:
    """An engine of bfloat16, and two trainer stages of float32 that send what changed."""
    transport, engine_tp, num_updates = request.param
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("delta"), tied=False)
    engine = {
        "target": "tests.functional.digesting_engine:DigestingEngine",
        "precision": Precision.bfloat16,
        "tensor_parallel_size": engine_tp,
    }
    stage = {"sent_dtype": "bfloat16", "delta": True}
    with processes_for(transport, processes, f"delta-{engine_tp}") as own:
        setup = own.setup(checkpoint, transport, num_stages=2, engine=engine, stage=stage)
        yield Sending(setup, transport, num_updates)


def test_after_many_updates_the_engine_has_the_weights_of_a_full_push(sending: Sending) -> None:
    setup = sending.setup
    first = push(setup, 0)
    assert first["weight_sync_changed_share"] == 1.0
    assert first["weight_sync_saved_bytes"] == 0
    before = state(setup)
    for version in range(1, sending.num_updates + 1):
        setup.all([stage.submit("update", version, LEARNING_RATE) for stage in setup.stages])
        sent = push(setup, version)
        assert 0 < sent["weight_sync_changed_share"] < 0.05
        # An index of four bytes and a value of two for each of these, where all values take two.
        assert sent["weight_sync_bytes"] == pytest.approx(
            3 * sent["weight_sync_changed_share"] * first["weight_sync_bytes"]
        )
        assert sent["weight_sync_saved_bytes"] == first["weight_sync_bytes"] - sent["weight_sync_bytes"]
    by_changes = state(setup)
    assert by_changes != before
    full = full_push(setup, sending.transport, sending.num_updates + 1)
    assert full["weight_sync_bytes"] == first["weight_sync_bytes"]
    assert full["weights_digest"] == sent["weights_digest"]
    assert state(setup) == by_changes


def test_an_engine_that_is_connected_anew_gets_everything_as_does_one_after_a_transfer_that_failed(
    sending: Sending,
) -> None:
    """One stage may have written its changes when the transfer is given up, and the engine has none."""
    setup, transport = sending.setup, sending.transport
    version = setup.version() + 1
    connect(setup, transport, delta=True)
    assert push(setup, version)["weight_sync_changed_share"] == 1.0
    setup.all([stage.submit("update", 100, LEARNING_RATE) for stage in setup.stages])
    setup.all([setup.stages[1].submit("spoil", "model.norm.weight")])
    for call in [stage.submit("push_weights", version + 1) for stage in setup.stages]:
        try:
            setup.all([call])
        except ActorBroken:  # a broadcast broke off, so the engine serves no more
            return
        except ActorFailed:
            continue
    setup.all([setup.stages[1].submit("spoil", None)])
    assert push(setup, version + 2)["weight_sync_changed_share"] == 1.0
    after_failure = state(setup)
    full_push(setup, transport, version + 3)
    assert state(setup) == after_failure


# Adapters alone

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.fixture(
    params=[
        (WeightTransport.shared_memory, 1, True),
        pytest.param((WeightTransport.collective, 2, False), marks=pytest.mark.slow),
    ],
    ids=lambda case: f"{case[0].value}-tp{case[1]}",
    scope="module",
)
def adapters(
    request: pytest.FixtureRequest, processes: Processes, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Setup]:
    """An engine and two trainer stages of adapters."""
    transport, engine_tp, tied = request.param
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("adapters"), tied=tied)
    adapter = EngineAdapter(4, tuple(LAYERS) if engine_tp > 1 else ())
    engine = {"adapter": adapter, "tensor_parallel_size": engine_tp}
    stage = {"kind": "AdapterStage", "targets": LAYERS}
    with processes_for(transport, processes, "adapters") as own:
        yield own.setup(checkpoint, transport, num_stages=2, engine=engine, stage=stage)


def test_a_request_before_the_first_adapters_is_not_sampled_without_them(adapters: Setup) -> None:
    adapters.all([adapters.engines[0].submit("pause", 0)])
    with pytest.raises(ActorFailed, match="waits for its first adapters"):
        adapters.submit("too-early")


def test_an_engine_with_adapters_samples_from_the_merged_weights(adapters: Setup) -> None:
    in_memory = set(os.listdir("/dev/shm"))
    for version in (0, 1, 2):
        adapters.update(version)
        sent = adapters.push(version)
        results = adapters.generate(f"v{version}")
        assert {result.policy_version for result in results} == {version}
        assert {result.weights_digest for result in results} == {sent["weights_digest"].value}
        assert adapters.logprob_error(results) < 1e-5
    assert 0 < 5 * sent["weight_sync_bytes"].value < sent["weight_sync_saved_bytes"].value
    assert not {name for name in set(os.listdir("/dev/shm")) - in_memory if name.startswith("tmp")}


def test_the_canary_is_computed_with_the_adapters_too(adapters: Setup) -> None:
    [engine] = adapters.engines
    [before] = adapters.all([engine.submit("canary_logprobs", PROMPT)])
    [stats] = adapters.all([engine.submit("stats")])
    adapters.update(77)
    adapters.push(stats.policy_version + 1)
    [after] = adapters.all([engine.submit("canary_logprobs", PROMPT)])
    assert max(abs(old - new) for old, new in zip(before, after, strict=True)) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_an_engine_with_adapters_that_drafts_samples_from_the_merged_weights(
    ray_of_engines: None, tmp_path: Path, method: str
) -> None:
    """In processes of its own, since none has an engine that drafts and another one."""
    checkpoint = make_checkpoint(tmp_path / "model", tied=True)
    by_method: dict[str, dict[str, Any]] = {
        "ngram": {"prompt_lookup_max": 2, "prompt_lookup_min": 1},
        "draft_model": {"model": str(checkpoint)},
    }
    drafts = {"method": method, "num_speculative_tokens": 2, **by_method[method]}
    engine = {"adapter": EngineAdapter(4, ()), "vllm_kwargs": {"speculative_config": drafts}}
    stage = {"kind": "AdapterStage", "targets": LAYERS}
    own = Processes(f"drafts-{method}")
    setup = own.setup(checkpoint, WeightTransport.shared_memory, num_stages=2, engine=engine, stage=stage)
    try:
        for version in (0, 1):
            setup.update(version)
            setup.push(version)
            results = setup.generate(f"v{version}")
            assert {result.policy_version for result in results} == {version}
            assert setup.logprob_error(results) < 1e-5
        [stats] = setup.all([setup.engines[0].submit("stats")])
        assert stats.num_drafts > 0
    finally:
        own.stop()


# Whole weights


@pytest.fixture(scope="module")
def shared(processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Setup:
    """Two engines, a trainer of two pipeline stages, tied embeddings; through shared memory."""
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("tied"), tied=True)
    engine = {"target": "tests.functional.held_engine:HeldEngine"}
    return processes.setup(checkpoint, WeightTransport.auto, num_engines=2, num_stages=2, engine=engine)


@pytest.fixture(scope="module")
def broadcast(shared: Setup) -> Setup:
    """The same engines and stages, by broadcast from now on."""
    shared.all([stage.submit("send_by", WeightTransport.collective) for stage in shared.stages])
    shared.connect()
    return shared


@pytest.fixture(scope="module")
def tensor_parallel(ray_of_engines: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    """One engine over two tensor-parallel workers, two trainer stages, an untied output layer; broadcast."""
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("untied"), tied=False)
    setup = start(checkpoint, "untied", WeightTransport.collective, num_stages=2, tensor_parallel_size=2)
    yield setup
    setup.cluster.stop()


@pytest.fixture(scope="module")
def experts(ray_of_engines: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
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
    broadcast.all([engine.submit("hold", True) for engine in broadcast.engines])
    ids = broadcast.submit("in-flight")
    with pytest.raises(ActorFailed, match="still generates 1 groups"):
        broadcast.push(version + 1)
    broadcast.all([engine.submit("hold", False) for engine in broadcast.engines])
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
        match=r"'shared-engine-\d' failed during .* broke off: .*sent no weights for \['model.norm.weight'\]",
    ):
        broadcast.push(version)
    with pytest.raises(ActorBroken, match=r"actor 'shared-engine-\d' failed"):
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
    workers_of(pid)[0].kill()
    _, alive = psutil.wait_procs([psutil.Process(pid)], timeout=TIMEOUT_S)
    assert not alive
