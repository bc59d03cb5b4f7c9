"""Training without computing the samples that have no gradient: the same update, from fewer rows."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from nemo_like.algorithms.options import LossConfig
from nemo_like.batch.columns import POLICY_COLUMNS
from nemo_like.batch.sharding import shard_for_training
from nemo_like.batch.tags import IS_IDLE
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.data_plane.in_memory import InMemoryDataPlane
from nemo_like.driver.stages import with_idle
from nemo_like.observability.metrics import Metric, merge
from nemo_like.policy.groups.parallelism import parallel_layout, train_strategy
from nemo_like.policy.options import PolicyConfig
from tests.functional.policy_fixtures import (
    MicroBatching,
    loss_config,
    make_checkpoint,
    policy_config,
    put_samples,
    random_batch,
    ready_worker,
)
from tests.functional.worlds import run_world

NUM_SAMPLES = 8
LAYOUTS: dict[str, dict[str, Any]] = {
    "DP2": {"dp": 2},
    "PP2, packed": {"pp": 2, "micro_batching": MicroBatching.packed},
    "DP2, prompts shared": {"dp": 2, "micro_batching": MicroBatching.shared},
    "FSDP2 over two, dynamic": {
        "dp": 2,
        "backend": "fsdp",
        "micro_batching": MicroBatching.dynamic,
    },
}
Trained = tuple[dict[str, Metric], dict[str, Tensor], int]


def train_both(
    coordinates: Coordinates, cfg: PolicyConfig, loss: LossConfig, batch: dict[str, Any]
) -> tuple[Trained, Trained]:
    """On one rank, with everything computed and without the samples that have no gradient."""
    everything, some = (train(coordinates, cfg, loss, batch, skips) for skips in (False, True))
    return everything, some


def train(
    coordinates: Coordinates, cfg: PolicyConfig, loss: LossConfig, batch: dict[str, Any], skips: bool
) -> Trained:
    """One rank's metrics where it leads, its weights after two updates, and how many rows it computed."""
    plane = InMemoryDataPlane()
    meta = put_samples(plane, "step", batch)
    meta = plane.write(meta, {column.name: batch["columns"][column.name] for column in POLICY_COLUMNS})
    worker = ready_worker(cfg, loss, coordinates, plane)
    shard = shard_for_training(
        meta,
        num_shards=cfg.data_parallel_size,
        global_batch_size=cfg.train_global_batch_size,
        strategy=train_strategy(cfg),
        is_idle=[bool(idle) for idle in with_idle(meta, loss).tag(IS_IDLE)] if skips else None,
    )[coordinates.dp]
    update = worker.train(shard)
    weights = {name: tensor.clone() for name, tensor in worker._backend.stage_weights()}
    assert shard.schedule is not None
    return dict(update.metrics) if update else {}, weights, shard.schedule.num_rows


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("token_level_loss", [True, False])
def test_samples_without_a_gradient_need_not_be_computed(
    layout: str, token_level_loss: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = make_checkpoint(tmp_path_factory.mktemp("idle") / "model")
    batch = random_batch(2 * NUM_SAMPLES)
    for row in (0, 2, 3, 5, 6, 9, 12, 13, 14):  # some are masked beside these
        batch["tags"]["advantage"][row] = 0.0
    for column in POLICY_COLUMNS:
        batch["columns"][column.name] = batch["columns"]["generation_logprobs"]
    cfg = replace(policy_config(path, **LAYOUTS[layout]), train_global_batch_size=NUM_SAMPLES)
    loss = loss_config(token_level_loss=token_level_loss)
    ranks = run_world(train_both, parallel_layout(cfg), cfg, loss, batch)
    everything, some = zip(*ranks, strict=True)
    expected = merge(metrics for metrics, _, _ in everything)
    found = merge(metrics for metrics, _, _ in some)
    for name in ("loss", "grad_norm", "lr"):
        assert found[name].value == pytest.approx(expected[name].value, rel=1e-5, abs=1e-7)
    for (_, ours, _), (_, theirs, _) in zip(some, everything, strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours:
            torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)
    assert sum(rows for _, _, rows in some) < 0.8 * sum(rows for _, _, rows in everything)
