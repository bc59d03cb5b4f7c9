"""A mixture's experts in real engines: loaded a layer at once, they are what they are one by one."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_like.cluster.actor_errors import ActorFailed
from nemo_like.cluster.actors import ActorHandle
from nemo_like.cluster.cluster import Cluster
from nemo_like.generation.expert_stacks import own_experts
from tests.functional.generation_fixtures import TIMEOUT_S, engine_spec, make_checkpoint

# The first test of a module also waits for its engine.
pytestmark = pytest.mark.timeout(300)

NUM_LAYERS, NUM_EXPERTS = 2, 4
TARGET = "tests.functional.expert_loading_engine:ExpertLoadingEngine"


@dataclass
class Hosted:
    """An engine of the mixture in ``checkpoint``."""

    cluster: Cluster
    engine: ActorHandle
    checkpoint: Path

    def load(self, seed: int, **options: Any) -> tuple[list[str], int]:
        call = self.engine.submit("load", str(self.checkpoint), seed, **options)
        return self.cluster.gather([call], stage="test", timeout_s=TIMEOUT_S)[0]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param({}, id="one worker"),
        pytest.param({"tensor_parallel_size": 2}, marks=pytest.mark.slow, id="tensor-parallel"),
        pytest.param(
            {"tensor_parallel_size": 2, "vllm_kwargs": {"enable_expert_parallel": True}},
            marks=pytest.mark.slow,
            id="expert-parallel",
        ),
    ],
)
def hosted(
    ray_of_engines: None, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Hosted]:
    path = tmp_path_factory.mktemp("mixture")
    checkpoint = make_checkpoint(path, tied=False, num_experts=NUM_EXPERTS, expert_size=64)
    options = dict(request.param)
    arguments = options.pop("vllm_kwargs", {})
    spec = engine_spec(checkpoint, "engine", target=TARGET, vllm_kwargs=arguments, **options)
    cluster = Cluster()
    yield Hosted(cluster, cluster.start(spec), checkpoint)
    cluster.stop()


def test_experts_loaded_at_once_leave_the_weights_that_they_leave_one_by_one(hosted: Hosted) -> None:
    expected, num_all = hosted.load(1, one_by_one=True)
    others, _ = hosted.load(2)
    assert all(one != other for one, other in zip(expected, others, strict=True))
    digests, num_single = hosted.load(1)
    assert digests == expected
    assert num_all - num_single == 3 * NUM_EXPERTS * NUM_LAYERS


def test_an_expert_that_does_not_come_is_named(hosted: Hosted) -> None:
    """Last, since the engine then holds a part of its weights."""
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    with pytest.raises(ActorFailed, match=rf"the trainer sent no weights for \['{name}'\] \(1 in all\)"):
        hosted.load(3, without=name)


@pytest.mark.parametrize(
    ("places", "own"),
    [
        (None, [0, 1, 2, 3]),
        ([-1, -1, 0, 1], [2, 3]),
        ([0, -1, 1, -1], [0, 2]),
        ([1, -1, 0, -1], [2, 0]),
        ([-1, -1, -1, -1], []),
        ([0, 1, -1, -1, 2], [0, 1]),  # after the experts one that is shared
    ],
)
def test_a_workers_experts_are_in_its_own_order(places: list[int] | None, own: list[int]) -> None:
    assert own_experts(4, None if places is None else torch.tensor(places)) == own
