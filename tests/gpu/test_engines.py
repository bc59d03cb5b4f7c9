"""Real engines on a GPU that they share with a trainer: weights by CUDA's inter-process memory, sleep, start.

Without a GPU the test of the weights runs on the CPU through shared memory, so that it is tested itself; this
takes an engine that other quick tests do not need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from nemo_like.cluster.actor_errors import ActorFailed
from nemo_like.cluster.stage import EngineHolds
from nemo_like.policy.options import Device
from tests.functional.generation_fixtures import make_checkpoint
from tests.gpu.engine_fixtures import ENGINE_SHARE, World, start_world

# The first test of a module also waits for its engines.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(300)]

GIB = 2**30
# Nats, and nats in the mean: rounding of two layers in bfloat16, which has 8 bits.
TOLERANCE, MEAN_TOLERANCE = 0.25, 0.05


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("tied"), tied=True)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(Device.cpu, marks=pytest.mark.slow),
        pytest.param(Device.cuda, marks=pytest.mark.gpu),
    ],
)
def world(private_ray: None, checkpoint: Path, request: pytest.FixtureRequest) -> Iterator[World]:
    """One engine on the CPU; two on a GPU: between tests the first is awake, and the second sleeps."""
    on_gpu = request.param is Device.cuda
    started = start_world(checkpoint, request.param, num_engines=2 if on_gpu else 1)
    if on_gpu:
        for index in range(2):
            started.hold(EngineHolds.weights, index)
        started.push_weights()
        started.hold(EngineHolds.everything)
        started.hold(EngineHolds.nothing, 1)
    else:
        started.push_weights()
    yield started
    started.cluster.stop()


on_a_gpu = pytest.mark.parametrize("world", [pytest.param(Device.cuda, marks=pytest.mark.gpu)], indirect=True)


def used_bytes() -> int:
    """Of the first GPU, by all processes."""
    free, total = torch.cuda.mem_get_info(0)
    return total - free


def largest(one: list[float], other: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def assert_same_policy(engine: list[float], trainer: list[float]) -> None:
    assert largest(engine, trainer) < TOLERANCE
    assert sum(abs(a - b) for a, b in zip(engine, trainer, strict=True)) / len(engine) < MEAN_TOLERANCE


def test_an_engine_computes_with_the_weights_that_were_sent(world: World) -> None:
    before = world.canary()
    assert_same_policy(before, world.trainers_canary())
    world.ask(world.trainer, "update", 1)
    assert largest(before, world.trainers_canary()) > 4 * TOLERANCE
    if len(world.engines) > 1:  # every engine takes part in a transfer, so it must have room for weights
        world.hold(EngineHolds.weights, 1)
    metrics = world.push_weights()
    if len(world.engines) > 1:
        world.hold(EngineHolds.nothing, 1)
    assert metrics["weight_sync_bytes"].value > 0
    assert_same_policy(world.canary(), world.trainers_canary())


@on_a_gpu
def test_a_sleeping_engine_gives_its_memory_back_and_wakes_as_it_was(
    world: World, record_property: Callable[[str, object], None]
) -> None:
    share = ENGINE_SHARE * torch.cuda.mem_get_info(0)[1]
    canary, response, awake = world.canary(), world.generate(), used_bytes()
    world.hold(EngineHolds.nothing)
    asleep = used_bytes()
    # Its context stays, and what kernels keep for themselves.
    assert awake - asleep > share - 2 * GIB
    with pytest.raises(ActorFailed, match="sleeps, so it cannot generate"):
        world.canary()
    world.hold(EngineHolds.weights)
    with_weights = used_bytes()
    for name, num_bytes in {"awake": awake, "asleep": asleep, "with_weights": with_weights}.items():
        record_property(f"gib_of_all_processes_{name}", num_bytes / GIB)
    assert abs(with_weights - asleep) < GIB  # the model is tiny
    world.hold(EngineHolds.everything)
    assert abs(used_bytes() - awake) < GIB
    assert largest(world.canary(), canary) < 1e-3
    assert world.generate() == response


@on_a_gpu
def test_weights_are_sent_before_the_kv_cache_wakes(world: World) -> None:
    world.hold(EngineHolds.nothing)
    world.ask(world.trainer, "update", 2)
    for index in range(2):
        world.hold(EngineHolds.weights, index)
    world.push_weights()
    world.hold(EngineHolds.nothing, 1)
    world.hold(EngineHolds.everything)
    canary = world.canary()
    assert_same_policy(canary, world.trainers_canary())
    # The version in force survives another sleep.
    world.hold(EngineHolds.nothing)
    world.hold(EngineHolds.everything)
    assert largest(world.canary(), canary) < 1e-3


@on_a_gpu
def test_an_engine_that_lost_its_weights_asleep_computes_with_those_that_come(world: World) -> None:
    with pytest.raises(ActorFailed, match="lost its weights while it slept, and no others have come"):
        world.hold(EngineHolds.everything, 1)
    world.hold(EngineHolds.weights, 1)
    world.push_weights()
    world.hold(EngineHolds.everything, 1)
    assert largest(world.canary(0), world.canary(1)) < 1e-3
    assert world.generate(0) == world.generate(1)
    world.hold(EngineHolds.nothing, 1)


def test_a_fresh_engine_of_the_weights_that_were_sent_responds_alike(world: World, tmp_path: Path) -> None:
    """The first engine captured its graphs with other weights, and has slept since. Last, since it ends with
    all engines asleep."""
    on_gpu = len(world.engines) > 1
    world.ask(world.trainer, "update", 3)
    if on_gpu:
        world.hold(EngineHolds.nothing)
        world.hold(EngineHolds.weights)
        world.hold(EngineHolds.weights, 1)
    world.push_weights()
    if on_gpu:
        world.hold(EngineHolds.nothing, 1)
        world.hold(EngineHolds.everything)
    response, canary = world.generate(), world.canary()
    if on_gpu:
        world.hold(EngineHolds.nothing)
    (tmp_path / "saved").mkdir()
    world.ask(world.trainer, "save", str(tmp_path / "saved"))
    with world.fresh_engine(tmp_path / "saved", Device.cuda if on_gpu else Device.cpu) as fresh:
        assert world.generate(fresh) == response
        assert largest(world.canary(fresh), canary) < 1e-3
