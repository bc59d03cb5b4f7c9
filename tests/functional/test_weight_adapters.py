"""Only adapters travel, and a real engine samples as from weights with the adapters merged into them."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from nemo_like.cluster.actor_errors import ActorFailed
from nemo_like.cluster.cluster import Cluster
from nemo_like.config.derived import EngineAdapter
from nemo_like.config.schema import WeightTransport
from tests.functional.generation_fixtures import collector_spec, engine_spec, make_checkpoint, stage_spec
from tests.functional.test_weight_sync import PROMPT, Setup

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("nobody_dies")]

LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def start(
    checkpoint: Path,
    transport: WeightTransport,
    engine_tp: int,
    name: str,
    drafts: Mapping[str, Any] | None = None,
) -> Setup:
    cluster = Cluster()
    engine = cluster.start(
        engine_spec(
            checkpoint,
            f"{name}-engine",
            tensor_parallel_size=engine_tp,
            adapter=EngineAdapter(4, tuple(LAYERS) if engine_tp > 1 else ()),
            vllm_kwargs={"speculative_config": drafts} if drafts else None,
        )
    )
    stages = [
        cluster.start(stage_spec(checkpoint, name, stage, 2, transport, kind="AdapterStage", targets=LAYERS))
        for stage in (0, 1)
    ]
    setup = Setup(cluster, [engine], stages, cluster.start(collector_spec(f"{name}-collector")))
    setup.connect()
    return setup


@pytest.fixture(
    params=[
        (WeightTransport.shared_memory, 1, True),
        pytest.param((WeightTransport.collective, 2, False), marks=pytest.mark.slow),
    ],
    ids=lambda case: f"{case[0].value}-tp{case[1]}",
    scope="module",
)
def setup(
    request: pytest.FixtureRequest, private_ray: None, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Setup]:
    transport, engine_tp, tied = request.param
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("adapters"), tied=tied)
    setup = start(checkpoint, transport, engine_tp, f"adapters-{transport.value}")
    yield setup
    setup.cluster.stop()


def test_a_request_before_the_first_adapters_is_not_sampled_without_them(setup: Setup) -> None:
    setup.all([setup.engines[0].submit("pause", 0)])
    with pytest.raises(ActorFailed, match="waits for its first adapters"):
        setup.submit("too-early")


def test_an_engine_with_adapters_samples_from_the_merged_weights(setup: Setup) -> None:
    in_memory = set(os.listdir("/dev/shm"))
    for version in (0, 1, 2):
        setup.update(version)
        sent = setup.push(version)
        results = setup.generate(f"v{version}")
        assert {result.policy_version for result in results} == {version}
        assert {result.weights_digest for result in results} == {sent["weights_digest"].value}
        assert setup.logprob_error(results) < 1e-5
    assert 0 < 5 * sent["weight_sync_bytes"].value < sent["weight_sync_saved_bytes"].value
    assert not {name for name in set(os.listdir("/dev/shm")) - in_memory if name.startswith("tmp")}


def test_the_canary_is_computed_with_the_adapters_too(setup: Setup) -> None:
    [engine] = setup.engines
    [before] = setup.all([engine.submit("canary_logprobs", PROMPT)])
    [stats] = setup.all([engine.submit("stats")])
    setup.update(77)
    setup.push(stats.policy_version + 1)
    [after] = setup.all([engine.submit("canary_logprobs", PROMPT)])
    assert max(abs(old - new) for old, new in zip(before, after, strict=True)) > 1e-2


@pytest.mark.slow
@pytest.mark.parametrize("method", ["ngram", "draft_model"])
def test_an_engine_with_adapters_that_drafts_samples_from_the_merged_weights(
    private_ray: None, tmp_path: Path, method: str
) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", tied=True)
    by_method: dict[str, dict[str, Any]] = {
        "ngram": {"prompt_lookup_max": 2, "prompt_lookup_min": 1},
        "draft_model": {"model": str(checkpoint)},
    }
    drafts = {"method": method, "num_speculative_tokens": 2, **by_method[method]}
    setup = start(checkpoint, WeightTransport.shared_memory, 1, f"drafts-{method}", drafts)
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
        setup.cluster.stop()
