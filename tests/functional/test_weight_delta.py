"""An engine of bfloat16, fed with what changed of float32 weights, has those of a full push, to the bit."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from nemo_like.cluster.actor_errors import ActorBroken, ActorFailed
from nemo_like.cluster.cluster import Cluster
from nemo_like.config.schema import Precision, WeightTransport
from tests.functional.generation_fixtures import engine_spec, make_checkpoint, stage_spec
from tests.functional.test_weight_sync import PROMPT, Setup

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("nobody_dies")]

# What AdamW moves a weight by at a learning rate of 1e-5; the weights are about 0.15.
LEARNING_RATE = 1e-5


def start(checkpoint: Path, name: str, transport: WeightTransport, *, engine_tp: int = 1) -> Setup:
    """One engine, and two trainer stages that send what changed."""
    cluster = Cluster()
    engine = cluster.start(
        engine_spec(
            checkpoint,
            name,
            tensor_parallel_size=engine_tp,
            precision=Precision.bfloat16,
            target="tests.functional.digesting_engine:DigestingEngine",
        )
    )
    options = {"sent_dtype": "bfloat16", "delta": True}
    stages = [
        cluster.start(stage_spec(checkpoint, f"{name}-trainer", stage, 2, transport, **options))
        for stage in (0, 1)
    ]
    setup = Setup(cluster, [engine], stages, engine)
    setup.connect()
    return setup


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


@dataclass(frozen=True)
class Sending:
    """An engine and its trainer, and how many updates the test of many makes."""

    setup: Setup
    transport: WeightTransport
    num_updates: int


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
    request: pytest.FixtureRequest, private_ray: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Sending]:
    transport, engine_tp, num_updates = request.param
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("delta"), tied=False)
    setup = start(checkpoint, f"delta-{transport.value}-{engine_tp}", transport, engine_tp=engine_tp)
    yield Sending(setup, transport, num_updates)
    setup.cluster.stop()


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
