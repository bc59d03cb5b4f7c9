"""A reference that moves towards the policy: its weights, and their way through a checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from nemo_like.batch.columns import PREV_LOGPROBS, REFERENCE_LOGPROBS
from nemo_like.batch.sharding import shard_for_logprobs, shard_for_training
from nemo_like.checkpoint.options import CheckpointWriting
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.data_plane.in_memory import InMemoryDataPlane
from nemo_like.policy.groups.parallelism import logprob_strategy, parallel_layout, train_strategy
from nemo_like.policy.options import PolicyConfig, ReferencePlacement
from nemo_like.policy.workers.worker import PolicyWorker
from tests.functional.dense_reference import DenseReference
from tests.functional.policy_fixtures import (
    loss_config,
    make_checkpoint,
    policy_config,
    put_samples,
    random_batch,
    ready_worker,
)
from tests.functional.worlds import run_world

pytestmark = pytest.mark.timeout(300)

BATCH = random_batch(16)
WEIGHT = 0.25
LOSS = loss_config(kl_penalty=0.1, reference_policy_sync_steps=1, reference_policy_sync_weight=WEIGHT)
LAYOUTS: dict[str, dict[str, Any]] = {
    "one": {},
    "on the host": {"reference_placement": ReferencePlacement.host_copy},
    "TP2": {"tp": 2},
    "PP2": {"pp": 2},
    "EP2": {"ep": 2, "dp": 2},
    "FSDP, one": {"backend": "fsdp"},
    "FSDP, DP2": {"backend": "fsdp", "dp": 2},
}
# The reference's log-prob of each sample, by its position in the batch.
Scores = dict[int, float]


@dataclass(frozen=True)
class Found:
    """What the leader of the first replica saw in one round."""

    reference: Scores
    grad_norm: float


def two_rounds(
    coordinates: Coordinates, cfg: PolicyConfig, path: Path, resume_from: Path | None
) -> list[Found | None]:
    """A round, a checkpoint, an export and another round; or, after a round that is forgotten, the second
    round alone from the checkpoint."""
    plane = InMemoryDataPlane()
    worker = ready_worker(cfg, LOSS, coordinates, plane)
    first = one_round(worker, plane, "first")
    if resume_from is None:
        worker.save_checkpoint(str(path / "checkpoint"), CheckpointWriting.background)
        worker.wait_for_checkpoint()
        worker.export_hf(str(path / "export"))
    else:
        # Another round, so that this worker's reference is another one than the checkpoint's.
        one_round(worker, plane, "forgotten")
        worker.load_checkpoint(str(resume_from / "checkpoint"), version=1)
    return [first, one_round(worker, plane, "second")]


def as_at_the_start(
    coordinates: Coordinates, cfg: PolicyConfig, path: Path, resume_from: Path | None
) -> list[Found | None]:
    """A checkpoint before any update, a round, the checkpoint again, and the round once more."""
    plane = InMemoryDataPlane()
    worker = ready_worker(cfg, LOSS, coordinates, plane)
    worker.save_checkpoint(str(path / "checkpoint"), CheckpointWriting.blocking)
    worker.wait_for_checkpoint()
    first = one_round(worker, plane, "first")
    worker.load_checkpoint(str(path / "checkpoint"), version=0)
    return [first, one_round(worker, plane, "again")]


def one_round(worker: PolicyWorker, plane: InMemoryDataPlane, name: str) -> Found | None:
    meta, coordinates = put_samples(plane, name, BATCH), worker.coordinates
    sizes = {"num_shards": coordinates.layout.dp, "global_batch_size": 8}
    scoring = shard_for_logprobs(meta, strategy=logprob_strategy(worker.cfg), **sizes)[coordinates.dp]
    worker.compute_logprobs(scoring, [PREV_LOGPROBS, REFERENCE_LOGPROBS])
    training = shard_for_training(meta, strategy=train_strategy(worker.cfg), **sizes)[coordinates.dp]
    if not coordinates.is_leader:
        worker.train(training)
        return None
    packed = torch.from_numpy(plane.fetch(scoring, ["reference_logprobs"])["reference_logprobs"].copy())
    scores = [float(one.sum()) for one in packed.split(list(scoring.lengths))]
    positions = [meta.sample_ids.index(sample) for sample in scoring.sample_ids]
    update = worker.train(training)
    assert update is not None
    return Found(dict(zip(positions, scores, strict=True)), update.metrics["grad_norm"].value)


def run(
    path: Path, layout: str, model: Path, resume_from: Path | None = None, rounds: Any = two_rounds
) -> list[Found]:
    cfg = policy_config(model, **LAYOUTS[layout])
    (path / "checkpoint").mkdir(parents=True)
    of_ranks: list[list[Found]] = run_world(rounds, parallel_layout(cfg), cfg, path, resume_from)
    return next(found for found in of_ranks if found[0] is not None)


def dense_scores(model: Path, export: Path | None = None) -> list[float]:
    """Each sample's log-prob under the model, or under WEIGHT x the exported model + (1 - WEIGHT) x it."""
    dense = DenseReference(policy_config(model), LOSS, 1.0)
    if export is not None:
        exported = AutoModelForCausalLM.from_pretrained(export, dtype=torch.float32).state_dict()
        with torch.no_grad():
            for name, value in dense.model.named_parameters():
                value.lerp_(exported[name], WEIGHT)
    return [float(one.sum()) for one in dense.logprobs(BATCH)]


def assert_scores(found: Scores, expected: list[float]) -> None:
    assert found == pytest.approx({position: expected[position] for position in found}, abs=2e-4)


@pytest.mark.parametrize(
    ("saved_by", "resumed_by"),
    [
        ("one", "TP2"),
        ("FSDP, DP2", "FSDP, one"),
        pytest.param("on the host", "PP2", marks=pytest.mark.slow),
        pytest.param("PP2", "on the host", marks=pytest.mark.slow),
        pytest.param("EP2", "one", marks=pytest.mark.slow),
    ],
)
def test_the_reference_is_a_mixture_that_a_checkpoint_keeps(
    saved_by: str, resumed_by: str, tmp_path: Path
) -> None:
    model = make_checkpoint(tmp_path / "model", "qwen3_moe" if saved_by == "EP2" else "qwen3")
    first, second = run(tmp_path / "saved", saved_by, model)
    again, resumed = run(tmp_path / "resumed", resumed_by, model, tmp_path / "saved")
    at_first, mixed = dense_scores(model), dense_scores(model, tmp_path / "saved" / "export")
    assert at_first != pytest.approx(mixed, abs=1e-2)
    for found in (first, again):
        assert_scores(found.reference, at_first)
    for found in (second, resumed):
        assert_scores(found.reference, mixed)
    assert resumed.grad_norm == pytest.approx(second.grad_norm, rel=1e-4)


@pytest.mark.parametrize("layout", ["one", pytest.param("FSDP, DP2", marks=pytest.mark.slow)])
def test_a_checkpoint_without_a_new_reference_brings_the_first_one_back(layout: str, tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "model")
    first, again = run(tmp_path / "saved", layout, model, rounds=as_at_the_start)
    assert first == again
