"""Two and four pipeline stages, each with a named group of its own, send into one engine by broadcast."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from ray.exceptions import RayError

from nemo_like.cluster.actor_errors import ActorFailed
from nemo_like.generation.options import WeightTransport
from tests.functional.generation_fixtures import TIMEOUT_S, make_checkpoint
from tests.functional.weight_setup import Setup, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(
    params=[(2, 1), (4, 1), (4, 2)], ids=lambda sizes: f"{sizes[0]}-stages-into-tp-{sizes[1]}", scope="module"
)
def stages(
    request: pytest.FixtureRequest, ray_of_engines: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Setup]:
    num_stages, engine_tp = request.param
    checkpoint: Path = make_checkpoint(tmp_path_factory.mktemp("stages"), tied=False, num_layers=4)
    setup = start(
        checkpoint,
        f"stages-{num_stages}-{engine_tp}",
        WeightTransport.collective,
        num_stages=num_stages,
        tensor_parallel_size=engine_tp,
    )
    yield setup
    setup.cluster.stop()


def test_the_engine_has_what_every_stage_sent(stages: Setup) -> None:
    for version in (0, 1):
        stages.update(version)
        sent = stages.push(version)
        results = stages.generate(f"v{version}")
        assert {result.policy_version for result in results} == {version}
        assert {result.weights_digest for result in results} == {sent["weights_digest"].value}
        assert stages.logprob_error(results) < 1e-4


def test_a_transfer_that_the_engine_refuses_holds_up_no_stage_and_the_next_one_arrives(stages: Setup) -> None:
    [before] = stages.generate("before")
    version = before.policy_version
    started_s = time.monotonic()
    pushes = [stage.submit("push_weights", version - 1) for stage in stages.stages]
    for push in pushes:
        with contextlib.suppress(ActorFailed):
            stages.all([push])
    assert time.monotonic() - started_s < TIMEOUT_S / 4
    stages.update(7)
    stages.push(version + 1)
    results = stages.generate("after")
    assert {result.policy_version for result in results} == {version + 1}
    assert stages.logprob_error(results) < 1e-4


def test_an_engine_that_is_killed_in_a_transfer_holds_up_no_stage(stages: Setup) -> None:
    """Last, since it ends the engine: before anything is sent, and every stage waits for the engine."""
    [engine] = stages.engines
    started_s = time.monotonic()
    waiting = [stage.submit("push_weights", 9) for stage in stages.stages[1:]]
    engine.kill()
    for push in [*waiting, stages.stages[0].submit("push_weights", 9)]:
        with pytest.raises(RayError):
            push.result(TIMEOUT_S)
    assert time.monotonic() - started_s < TIMEOUT_S / 4
