"""A critic that was saved and loaded trains on as if nothing had been, under any layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_like.batch.meta import KVBatchMeta
from nemo_like.batch.sharding import shard_for_training, shard_for_values
from nemo_like.checkpoint.options import CheckpointWriting, ResumeParts
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.data_plane.in_memory import InMemoryDataPlane
from nemo_like.policy.groups.parallelism import logprob_strategy, parallel_layout, train_strategy
from nemo_like.policy.options import ValueConfig
from nemo_like.policy.workers.value_worker import ValueWorker
from tests.functional.policy_fixtures import (
    loss_config,
    make_checkpoint,
    policy_config,
    put_samples,
    random_batch,
    ready_value_worker,
    value_config,
)
from tests.functional.test_policy_resume import LAYOUTS, nothing_is_written
from tests.functional.worlds import WorldPool

NUM_SAMPLES = 16
# The gradient norm of a leader, and the weights that a rank gathers.
Rounds = tuple[list[float], dict[str, torch.Tensor]]


def valued_batch() -> dict[str, Any]:
    batch = random_batch(NUM_SAMPLES)
    rewards = [float(row % 3) - 1 for row in range(NUM_SAMPLES)]
    more = {"shaped_reward": rewards, "is_truncated": [row % 4 == 1 for row in range(NUM_SAMPLES)]}
    return {**batch, "tags": {**batch["tags"], **more}}


def train_rounds(coordinates: Coordinates, cfg: ValueConfig, path: Path, *, resumes: bool) -> Rounds:
    """Two rounds of two updates, a checkpoint in between; or the second one alone, from the checkpoint."""
    plane = InMemoryDataPlane()
    worker = ready_value_worker(cfg, loss_config(), coordinates, plane)
    with nothing_is_written():
        if not resumes:
            train(worker, put_samples(plane, "first", valued_batch()))
            worker.save_checkpoint(str(path), CheckpointWriting.background)
        else:
            worker.load_checkpoint(str(path), version=1)
        norms = train(worker, put_samples(plane, "second", valued_batch()))
    worker.wait_for_checkpoint()
    assert worker.version == 2
    return norms, {name: weight.clone() for name, weight in worker._backend.stage_weights()}


def train(worker: ValueWorker, meta: KVBatchMeta) -> list[float]:
    place, strategy = worker.coordinates, train_strategy(worker.cfg)
    sizes = {"num_shards": place.layout.dp, "global_batch_size": 8}
    valuing = shard_for_values(meta, strategy=logprob_strategy(worker.cfg), train_strategy=strategy, **sizes)
    worker.compute_values(valuing[place.dp])
    update = worker.train(shard_for_training(meta, strategy=strategy, **sizes)[place.dp])
    return [] if update is None else [update.metrics["grad_norm"].value]


@pytest.fixture(scope="module")
def pool() -> Iterator[WorldPool]:
    with WorldPool() as pool:
        yield pool


def run(pool: WorldPool, layout: str, model: Path, path: Path, *, resumes: bool) -> Rounds:
    cfg = value_config(policy_config(model, **LAYOUTS[layout]))
    job = train_and_resume if resumes else train_and_save
    ranks = pool.run(job, parallel_layout(cfg), cfg, path)
    (norms, *_) = [norms for norms, _ in ranks if norms]
    weights = {name: weight for _, gathered in ranks for name, weight in gathered.items()}
    weights["lm_head.weight"] = weights["lm_head.weight"][:1]  # of tensor-parallel ranks, each has a copy
    return norms, weights


def train_and_save(coordinates: Coordinates, cfg: ValueConfig, path: Path) -> Rounds:
    return train_rounds(coordinates, cfg, path, resumes=False)


def train_and_resume(coordinates: Coordinates, cfg: ValueConfig, path: Path) -> Rounds:
    return train_rounds(coordinates, cfg, path, resumes=True)


@pytest.mark.parametrize(
    ("saved_by", "resumed_by", "tolerance"),
    [
        ("TP2", "TP2", 0.0),
        ("TP2", "DP2 with sharded optimizer", 1e-5),
        ("FSDP, DP2", "FSDP, DP2", 0.0),
        ("FSDP, DP2", "FSDP, TP2", 1e-5),
        ("adapters, TP2", "adapters, TP2", 0.0),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in [
                ("DP2 with sharded optimizer", "DP2 with sharded optimizer", 0.0),
                ("DP2 with sharded optimizer", "TP2", 1e-5),
                ("PP2", "one", 1e-5),
                ("one", "PP2", 1e-5),
                ("TP2 x PP2 with replicated optimizer", "DP2 with replicated optimizer", 1e-5),
                ("FSDP, TP2", "FSDP, one", 1e-5),
                ("adapters, TP2", "adapters, PP2", 1e-5),
                ("adapters, DP2", "adapters, TP2", 1e-5),
                ("FSDP, adapters, DP2", "FSDP, adapters, TP2", 1e-5),
            ]
        ),
    ],
)
def test_a_resumed_critic_trains_on_as_if_never_stopped(
    saved_by: str, resumed_by: str, tolerance: float, pool: WorldPool, tmp_path: Path
) -> None:
    check_resumption(pool, "qwen3", saved_by, resumed_by, tolerance, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("saved_by", "resumed_by"), [("EP2", "one"), ("one", "EP2"), ("EP2 x TP2", "EP2")])
def test_a_critic_with_experts_trains_on_under_other_expert_parallelism(
    saved_by: str, resumed_by: str, pool: WorldPool, tmp_path: Path
) -> None:
    check_resumption(pool, "qwen3_moe", saved_by, resumed_by, 1e-5, tmp_path)


def check_resumption(
    pool: WorldPool, model_type: str, saved_by: str, resumed_by: str, tolerance: float, tmp_path: Path
) -> None:
    model = make_checkpoint(tmp_path / "model", model_type, is_critic=True)
    path = tmp_path / "checkpoint"
    path.mkdir()
    norms, expected = run(pool, saved_by, model, path, resumes=False)
    resumed_norms, found = run(pool, resumed_by, model, path, resumes=True)
    assert resumed_norms == pytest.approx(norms, abs=tolerance)
    assert found.keys() == expected.keys()
    assert expected["lm_head.weight"].abs().min() > 0
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=tolerance)


def loaded_weights(coordinates: Coordinates, cfg: ValueConfig, path: Path) -> list[dict[str, torch.Tensor]]:
    """What a critic has that takes the weights alone, and one that takes everything."""
    found = []
    for parts in (ResumeParts.weights, ResumeParts.all):
        worker = ready_value_worker(cfg, loss_config(), coordinates, InMemoryDataPlane())
        worker.load_checkpoint(str(path), version=0, parts=parts)
        assert worker._backend.num_updates == (2 if parts is ResumeParts.all else 0)
        found.append({name: weight.clone() for name, weight in worker._backend.stage_weights()})
    return found


@pytest.mark.parametrize("layout", ["TP2", "FSDP, DP2"])
def test_a_critic_begins_with_the_weights_of_another(layout: str, pool: WorldPool, tmp_path: Path) -> None:
    model, path = make_checkpoint(tmp_path / "model", is_critic=True), tmp_path / "checkpoint"
    path.mkdir()
    run(pool, layout, model, path, resumes=False)
    cfg = value_config(policy_config(model, **LAYOUTS[layout]))
    for alone, whole in pool.run(loaded_weights, parallel_layout(cfg), cfg, path):
        assert alone.keys() == whole.keys()
        assert all(torch.equal(alone[name], weight) for name, weight in whole.items())
