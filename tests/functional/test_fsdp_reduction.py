"""When FSDP sums the gradients of a data-parallel group."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from torch.profiler import ProfilerActivity, profile

from nemo_like.batch.columns import PREV_LOGPROBS
from nemo_like.batch.sharding import shard_for_logprobs, shard_for_training
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.data_plane.in_memory import InMemoryDataPlane
from nemo_like.policy.groups.parallelism import logprob_strategy, parallel_layout, train_strategy
from nemo_like.policy.options import PolicyConfig
from tests.functional.policy_fixtures import (
    loss_config,
    make_checkpoint,
    policy_config,
    put_samples,
    random_batch,
    ready_worker,
)
from tests.functional.worlds import run_world

BATCH = random_batch(16)  # two updates of eight samples: on each of two ranks four micro-batches of one


def train(coordinates: Coordinates, cfg: PolicyConfig) -> tuple[int, float]:
    """How often gradients were summed over the ranks, and the norm of the last update's."""
    plane = InMemoryDataPlane()
    worker = ready_worker(cfg, loss_config(), coordinates, plane)
    meta = put_samples(plane, "first", BATCH)
    sizes = {"num_shards": 2, "global_batch_size": 8}
    own = shard_for_logprobs(meta, strategy=logprob_strategy(cfg), **sizes)[coordinates.dp]
    worker.compute_logprobs(own, [PREV_LOGPROBS])
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        update = worker.train(shard_for_training(meta, strategy=train_strategy(cfg), **sizes)[coordinates.dp])
    reductions = sum(one.count for one in profiled.key_averages() if one.key == "c10d::_reduce_scatter_base_")
    return reductions, 0.0 if update is None else update.metrics["grad_norm"].value


def test_gradients_are_summed_over_the_ranks_once_per_update_where_that_is_asked_for(tmp_path: Path) -> None:
    cfg = policy_config(make_checkpoint(tmp_path / "model"), dp=2, backend="fsdp", micro_batch_size=1)
    once = replace(cfg, fsdp_cfg=replace(cfg.fsdp_cfg, reduce_gradients_once=True))
    (often, norm), _ = run_world(train, parallel_layout(cfg), cfg)
    (seldom, same_norm), _ = run_world(train, parallel_layout(once), once)
    assert often == 4 * seldom > 0
    assert 0 < same_norm == pytest.approx(norm, rel=1e-5)
