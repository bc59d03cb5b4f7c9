"""Every parallel layout computes what a dense Hugging Face model with torch.optim does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_like.cluster.coordinates import Coordinates
from nemo_like.config.schema import LossConfig, PolicyConfig
from nemo_like.data_plane.columns import POLICY_COLUMNS, ROLLOUT_COLUMNS
from nemo_like.data_plane.in_memory import InMemoryDataPlane
from nemo_like.data_plane.meta import KVBatchMeta
from nemo_like.data_plane.sharding import shard_for_logprobs, shard_for_training
from nemo_like.observability.metrics import merge
from nemo_like.policy.layout import length_multiple, parallel_layout
from nemo_like.policy.worker import PolicyWorker
from tests.functional.dense_reference import DenseReference
from tests.functional.policy_fixtures import (
    loss_config,
    make_checkpoint,
    policy_config,
    random_batch,
    run_world,
)

NUM_SAMPLES = 24  # three updates of eight
TEMPERATURE = 0.8
LEARNING_RATES = (
    1e-3,
    2e-3,
    2e-3 - 1.9e-3 / 4,
)  # two updates of warm-up, then linear from 2e-3 at 2 to 1e-4 at 6


class CountingDataPlane(InMemoryDataPlane):
    """Records every (column, sample) that is written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[tuple[str, str]] = []

    def write(self, meta: KVBatchMeta, columns: Any) -> KVBatchMeta:
        self.written += [(name, sample) for name in columns for sample in meta.sample_ids]
        return super().write(meta, columns)


def train_in_worker(
    coordinates: Coordinates, cfg: PolicyConfig, loss: LossConfig, batch: dict[str, Any], export: str
) -> dict[str, Any]:
    """What one rank of the world does: the phases of a step, by the worker's own methods."""
    plane = CountingDataPlane()
    plane.open_partition("step", [*ROLLOUT_COLUMNS, *POLICY_COLUMNS])
    tags = {
        **batch["tags"],
        "num_response_tokens": [
            int(mask.sum())
            for mask in np.split(batch["columns"]["response_mask"], np.cumsum(batch["lengths"])[:-1])
        ],
    }
    meta = plane.put(
        "step", batch["columns"], lengths=batch["lengths"], chunk_sizes=[4] * (NUM_SAMPLES // 4), tags=tags
    )
    worker = PolicyWorker(
        cfg=cfg,
        loss=loss,
        coordinates=coordinates,
        temperature=TEMPERATURE,
        data_plane=plane,
        weight_sender=None,
        master_addr="127.0.0.1",
        master_port=0,  # torch.distributed is initialised already
        timeout_s=60.0,
    )
    worker.setup()
    sizes = {
        "num_shards": coordinates.layout.dp,
        "global_batch_size": 8,
        "length_multiple": length_multiple(cfg),
    }
    scoring = shard_for_logprobs(meta, micro_batch_size=cfg.logprob_batch_size, **sizes)[coordinates.dp]
    scores = worker.compute_prev_logprobs(scoring)
    if loss.reference_policy_kl_penalty > 0:
        worker.compute_reference_logprobs(scoring)
    training = shard_for_training(meta, micro_batch_size=cfg.train_micro_batch_size, **sizes)[coordinates.dp]
    logprobs = plane.fetch(scoring, ["prev_logprobs"])["prev_logprobs"] if coordinates.is_leader else None
    update = worker.train(training)
    worker.export_hf(export)
    return {
        "sample_ids": scoring.sample_ids,
        "lengths": scoring.lengths,
        "all_ids": meta.sample_ids,
        "logprobs": logprobs,
        "scores": scores,
        "update": update,
        "written": plane.written,
        "version": worker.policy_version,
    }


def by_sample(ranks: list[dict[str, Any]]) -> list[torch.Tensor]:
    """The leaders' log-probs in the order of the whole batch."""
    found: dict[str, torch.Tensor] = {}
    for rank in ranks:
        if rank["logprobs"] is not None:
            parts = torch.from_numpy(rank["logprobs"]).split(list(rank["lengths"]))
            found |= dict(zip((name.split(".", 1)[1] for name in rank["sample_ids"]), parts, strict=True))
    return [found[name.split(".", 1)[1]] for name in ranks[0]["all_ids"]]


def check_against_dense(tmp_path: Path, cfg: PolicyConfig, loss: LossConfig, tolerance: float) -> None:
    batch = random_batch(NUM_SAMPLES)
    layout = parallel_layout(cfg)
    ranks = run_world(train_in_worker, layout, cfg, loss, batch, str(tmp_path / "export"))

    dense = DenseReference(cfg, loss, TEMPERATURE)
    prev = [logprobs.detach() for logprobs in dense.logprobs(batch)]
    reference = prev if loss.reference_policy_kl_penalty > 0 else None
    updates = [
        dense.update(batch, list(range(8 * index, 8 * index + 8)), prev, reference, rate)
        for index, rate in enumerate(LEARNING_RATES)
    ]

    for ours, theirs in zip(by_sample(ranks), prev, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance)
    metrics = {
        name: metric.value
        for name, metric in merge(r["update"].metrics for r in ranks if r["update"]).items()
    }
    assert metrics["loss"] == pytest.approx(np.mean([u.loss for u in updates]), abs=tolerance)
    assert metrics["grad_norm"] == pytest.approx(np.mean([u.grad_norm for u in updates]), rel=tolerance)
    assert metrics["lr"] == pytest.approx(np.mean(LEARNING_RATES))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "export", dtype=torch.float32).state_dict()
    expected = dense.model.state_dict()
    assert exported.keys() == expected.keys()
    for name, weight in exported.items():
        torch.testing.assert_close(
            weight, expected[name], rtol=0, atol=tolerance, msg=lambda text, n=name: f"{n}: {text}"
        )
    assert {rank["version"] for rank in ranks} == {1}


LAYOUTS = {
    "one process": {},
    "TP2": {"tp": 2},
    "TP2 with sequence parallelism": {"tp": 2, "sequence_parallel": True},
    "PP2": {"pp": 2},
    "DP2 with sharded optimizer": {"dp": 2},
    "DP2 with replicated optimizer": {"dp": 2, "use_distributed_optimizer": False},
    "TP2 x PP2": {"tp": 2, "pp": 2},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_three_updates_in_every_layout_equal_dense_training(tmp_path: Path, layout: dict[str, Any]) -> None:
    cfg = policy_config(make_checkpoint(tmp_path / "model"), **layout)
    check_against_dense(tmp_path, cfg, loss_config(kl_penalty=0.1), tolerance=1e-5)
