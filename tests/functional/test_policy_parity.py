"""Every parallel layout computes what a dense Hugging Face model with torch.optim does.

Each case runs the phases of one step, three optimizer updates, in real processes over gloo, and is
looked at from several sides.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
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
from nemo_like.observability.metrics import Metric, merge
from nemo_like.policy.layout import logprob_strategy, parallel_layout, train_strategy
from nemo_like.policy.results import WorkerScores, WorkerUpdate
from nemo_like.policy.worker import PolicyWorker
from tests.functional.dense_reference import DenseReference, DenseUpdate
from tests.functional.policy_fixtures import (
    MicroBatching,
    loss_config,
    make_checkpoint,
    policy_config,
    random_batch,
    run_world,
)

NUM_SAMPLES, GLOBAL_BATCH_SIZE, CHUNK_SIZE = 24, 8, 4
TEMPERATURE = 0.8
# Two updates of warm-up to 2e-3, then linear from update 2 towards 1e-4 at update 6.
LEARNING_RATES = (1e-3, 2e-3, 2e-3 - 1.9e-3 / 4)
TOLERANCE = 1e-5


@dataclass(frozen=True)
class Case:
    name: str
    layout: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    loss: dict[str, Any] = field(default_factory=lambda: {"kl_penalty": 0.1})

    def config(self, model: Path) -> PolicyConfig:
        return policy_config(model, **self.layout)


CASES = [
    Case("one process"),
    Case("TP2", {"tp": 2}),
    Case("TP2 with sequence parallelism", {"tp": 2, "sequence_parallel": True}),
    Case("PP2", {"pp": 2}),
    Case("DP2 with sharded optimizer", {"dp": 2}),
    Case("DP2 with replicated optimizer", {"dp": 2, "use_distributed_optimizer": False}),
    Case("TP2 x PP2", {"tp": 2, "pp": 2}),
    Case("TP2 x DP2", {"tp": 2, "dp": 2}),
    Case("one sample per micro-batch", {"micro_batch_size": 1}),
    Case("micro-batches of three, the last one smaller", {"micro_batch_size": 3, "pp": 2}),
    Case("packed", {"micro_batching": MicroBatching.packed}),
    Case(
        "packed, TP2 with sequence parallelism, PP2",
        {"tp": 2, "pp": 2, "sequence_parallel": True, "micro_batching": MicroBatching.packed},
    ),
    Case("dynamic, DP2", {"dp": 2, "micro_batching": MicroBatching.dynamic}),
    Case("sequence-level loss", {"dp": 2}, {}, {"token_level_loss": False}),
    Case("untied embeddings", {"tp": 2, "pp": 2}, {"tied": False}),
    Case("vocabulary that the ranks cannot share evenly", {"tp": 2}, {"vocab_size": 97, "tied": False}),
    Case("Llama in several files", {"tp": 2}, {"model_type": "llama", "tied": False, "shard_size": "80KB"}),
    Case("Qwen2 with attention biases", {"tp": 2, "pp": 2}, {"model_type": "qwen2"}),
]


class CountingDataPlane(InMemoryDataPlane):
    """Records every (column, sample) that is written to it, and every fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[tuple[str, str]] = []
        self.num_fetches = 0

    def write(self, meta: KVBatchMeta, columns: Any) -> KVBatchMeta:
        self.written += [(name, sample) for name in columns for sample in meta.sample_ids]
        return super().write(meta, columns)

    def fetch(self, meta: KVBatchMeta, columns: Any) -> dict[str, Any]:
        self.num_fetches += 1
        return super().fetch(meta, columns)


@dataclass(frozen=True)
class RankReport:
    """What one rank of a world saw. ``logprobs`` are its shard's, None when it does not lead."""

    coordinates: Coordinates
    positions: list[int]
    logprobs: list[torch.Tensor] | None
    scores: WorkerScores | None
    update: WorkerUpdate | None
    written: list[tuple[str, str]]
    num_fetches: int
    policy_version: int


def run_step(
    coordinates: Coordinates, cfg: PolicyConfig, loss: LossConfig, batch: dict[str, Any], export: str
) -> RankReport:
    """One rank: the phases of a step, by the worker's own methods, and the export of its weights."""
    plane = CountingDataPlane()
    plane.open_partition("step", [*ROLLOUT_COLUMNS, *POLICY_COLUMNS])
    chunk_sizes = [CHUNK_SIZE] * (NUM_SAMPLES // CHUNK_SIZE)
    meta = plane.put(
        "step", batch["columns"], lengths=batch["lengths"], chunk_sizes=chunk_sizes, tags=batch["tags"]
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
    sizes = {"num_shards": coordinates.layout.dp, "global_batch_size": GLOBAL_BATCH_SIZE}
    scoring = shard_for_logprobs(meta, strategy=logprob_strategy(cfg), **sizes)[coordinates.dp]
    scores = worker.compute_prev_logprobs(scoring)
    if loss.reference_policy_kl_penalty > 0:
        worker.compute_reference_logprobs(scoring)
    num_fetches = plane.num_fetches
    logprobs = None
    if coordinates.is_leader:
        packed = torch.from_numpy(plane.fetch(scoring, ["prev_logprobs"])["prev_logprobs"].copy())
        logprobs = list(packed.split(list(scoring.lengths)))
    training = shard_for_training(meta, strategy=train_strategy(cfg), **sizes)[coordinates.dp]
    update = worker.train(training)
    worker.export_hf(export)
    positions = [meta.sample_ids.index(sample) for sample in scoring.sample_ids]
    return RankReport(
        coordinates, positions, logprobs, scores, update, plane.written, num_fetches, worker.policy_version
    )


@dataclass(frozen=True)
class Outcome:
    """A case's world beside its dense reference."""

    case: Case
    batch: dict[str, Any]
    ranks: list[RankReport]
    exported: dict[str, torch.Tensor]
    dense_logprobs: list[torch.Tensor]
    dense_updates: list[DenseUpdate]
    dense_weights: dict[str, torch.Tensor]

    @property
    def leaders(self) -> list[RankReport]:
        return [rank for rank in self.ranks if rank.coordinates.is_leader]

    def metrics(self, phase: str) -> dict[str, Metric]:
        return merge(getattr(leader, phase).metrics for leader in self.leaders)


@pytest.fixture(scope="module", params=CASES, ids=lambda case: case.name)
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Outcome]:
    yield compare_with_dense(request.param, tmp_path_factory.mktemp("policy"))


def compare_with_dense(case: Case, path: Path) -> Outcome:
    """Run the case and its reference."""
    cfg = case.config(make_checkpoint(path / "model", **case.model))
    loss, batch = loss_config(**case.loss), random_batch(NUM_SAMPLES)
    ranks = run_world(run_step, parallel_layout(cfg), cfg, loss, batch, str(path / "export"))

    dense = DenseReference(cfg, loss, TEMPERATURE)
    prev = [logprobs.detach() for logprobs in dense.logprobs(batch)]
    reference = prev if loss.reference_policy_kl_penalty > 0 else None
    updates = [
        dense.update(batch, list(range(first, first + GLOBAL_BATCH_SIZE)), prev, reference, rate)
        for first, rate in zip(range(0, NUM_SAMPLES, GLOBAL_BATCH_SIZE), LEARNING_RATES, strict=True)
    ]
    exported = AutoModelForCausalLM.from_pretrained(path / "export", dtype=torch.float32).state_dict()
    return Outcome(case, batch, ranks, exported, prev, updates, dense.model.state_dict())


def test_logprobs_equal_the_dense_model(outcome: Outcome) -> None:
    for leader in outcome.leaders:
        for position, logprobs in zip(leader.positions, leader.logprobs, strict=True):
            torch.testing.assert_close(logprobs, outcome.dense_logprobs[position], rtol=0, atol=TOLERANCE)
    assert sorted(position for leader in outcome.leaders for position in leader.positions) == list(
        range(NUM_SAMPLES)
    )


def test_training_metrics_equal_the_dense_model(outcome: Outcome) -> None:
    metrics = {name: metric.value for name, metric in outcome.metrics("update").items()}
    dense = outcome.dense_updates
    assert metrics["loss"] == pytest.approx(np.mean([update.loss for update in dense]), abs=TOLERANCE)
    assert metrics["grad_norm"] == pytest.approx(
        np.mean([update.grad_norm for update in dense]), rel=TOLERANCE
    )
    assert metrics["lr"] == pytest.approx(np.mean(LEARNING_RATES))
    num_tokens = sum(update.num_tokens for update in dense)
    for name in ("ratio", "clipped_ratio", "kl"):
        ours = {"ratio": "probs_ratio", "clipped_ratio": "probs_ratio_clamped", "kl": "kl_penalty"}[name]
        expected = sum(float(getattr(update, name).sum()) for update in dense) / num_tokens
        assert metrics[ours] == pytest.approx(expected, abs=TOLERANCE)
    ratios = torch.cat([update.ratio for update in dense])
    assert metrics["probs_ratio_max"] == pytest.approx(float(ratios.max()), rel=1e-4)
    assert metrics["probs_ratio_min"] == pytest.approx(float(ratios.min()), rel=1e-4)


def test_exported_weights_equal_the_dense_model_after_its_updates(outcome: Outcome) -> None:
    assert outcome.exported.keys() == outcome.dense_weights.keys()
    for name, weight in outcome.exported.items():
        difference = (weight - outcome.dense_weights[name]).abs().max()
        assert difference < TOLERANCE, f"{name} differs by {difference:.1e}"


def test_mismatch_tags_compare_with_the_generation_logprobs_sample_by_sample(outcome: Outcome) -> None:
    lengths, columns = outcome.batch["lengths"], outcome.batch["columns"]
    generation = torch.from_numpy(columns["generation_logprobs"]).split(lengths)
    for leader in outcome.leaders:
        errors = leader.scores.tags["mult_prob_error"]
        for position, error in zip(leader.positions, errors, strict=True):
            gap = (generation[position] - outcome.dense_logprobs[position])[3:].abs()
            assert error == pytest.approx(float(gap.exp().mean()), rel=1e-4)


def test_mismatch_metrics_weigh_every_trained_token_alike(outcome: Outcome) -> None:
    lengths, columns = outcome.batch["lengths"], outcome.batch["columns"]
    generation = torch.from_numpy(columns["generation_logprobs"]).split(lengths)
    trained = [row for row, mask in enumerate(outcome.batch["tags"]["sample_mask"]) if mask]
    ratio = torch.cat([(outcome.dense_logprobs[row] - generation[row])[3:] for row in trained]).exp()
    metric = outcome.metrics("scores")["sampling_importance_ratio"]
    assert metric.weight == len(ratio)
    assert metric.value == pytest.approx(float(ratio.mean()), rel=1e-4)


def test_each_column_and_sample_is_written_once_and_by_leaders_only(outcome: Outcome) -> None:
    columns = ["prev_logprobs"] + (["reference_logprobs"] if outcome.case.loss.get("kl_penalty") else [])
    counts = Counter(key for rank in outcome.ranks for key in rank.written)
    assert set(counts.values()) == {1}
    assert len(counts) == len(columns) * NUM_SAMPLES
    assert {column for column, _ in counts} == set(columns)
    for rank in outcome.ranks:
        if not rank.coordinates.is_leader:
            assert (rank.written, rank.num_fetches, rank.scores, rank.update) == ([], 0, None, None)


def test_every_worker_counts_one_policy_version_per_training_phase(outcome: Outcome) -> None:
    assert {rank.policy_version for rank in outcome.ranks} == {1}
    assert {leader.update.policy_version for leader in outcome.leaders} == {1}
