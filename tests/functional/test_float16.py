"""Training in float16: what a dense model in float32 computes, and updates whose gradients overflow."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from nemo_like.batch.columns import PREV_LOGPROBS
from nemo_like.batch.sharding import shard_for_logprobs, shard_for_training
from nemo_like.cluster.coordinates import Coordinates
from nemo_like.data_plane.in_memory import InMemoryDataPlane
from nemo_like.observability.metrics import Metric, merge
from nemo_like.policy.groups.parallelism import logprob_strategy, parallel_layout, train_strategy
from nemo_like.policy.options import OptimizerKind, PolicyConfig, Precision
from nemo_like.tripwires.measured import Measured
from tests.functional.dense_reference import DenseReference
from tests.functional.policy_fixtures import (
    loss_config,
    make_checkpoint,
    policy_config,
    put_samples,
    random_batch,
    ready_worker,
)
from tests.functional.test_policy_parity import (
    ADAPTERS,
    DYNAMIC,
    GSPO,
    LEARNING_RATES,
    MIXTURE,
    PACKED,
    SEQUENCE_PARALLEL,
    SHARED,
    Case,
    Matrix,
    Outcome,
    as_params,
)
from tests.functional.worlds import run_world

FLOAT16: dict[str, Any] = {"precision": Precision.float16}
FSDP: dict[str, Any] = {"backend": "fsdp", **FLOAT16}
REPLICATED = {"use_distributed_optimizer": False}
MUON = {"optimizer_kind": OptimizerKind.muon}
CASES = [
    Case("one process, packed", {}, {**FLOAT16, **PACKED}, slow=True),
    Case("TP2 with sequence parallelism", SEQUENCE_PARALLEL, {**FLOAT16, **SHARED}, {}, GSPO),
    Case("PP2", {"pp": 2}, {**FLOAT16, **DYNAMIC}, slow=True),
    Case("CP2", {"cp": 2}, {**FLOAT16, **PACKED}, slow=True),
    Case("DP2", {"dp": 2}, FLOAT16, slow=True),
    Case("DP2, replicated optimizer", {"dp": 2}, {**FLOAT16, **REPLICATED}, slow=True),
    Case("EP2", {"ep": 2, "dp": 2}, FLOAT16, MIXTURE),
    Case("adapters, TP2", {"tp": 2}, {**FLOAT16, **ADAPTERS}, slow=True),
    Case("FSDP, DP2", {"dp": 2}, {**FSDP, **PACKED}),
    Case("FSDP, TP2", {"tp": 2}, {**FSDP, **SHARED}, {}, GSPO, slow=True),
    Case("FSDP, CP2", {"cp": 2}, FSDP, slow=True),
    Case("FSDP, adapters, DP2", {"dp": 2}, {**FSDP, **ADAPTERS}, slow=True),
]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    with Matrix(CASES, tmp_path_factory.mktemp("float16")) as matrix:
        yield matrix


@pytest.fixture(scope="module", params=as_params(CASES), ids=lambda case: case.name)
def outcome(request: pytest.FixtureRequest, matrix: Matrix) -> Outcome:
    return matrix.outcome(request.param)


def test_log_probs_are_those_of_float32_but_for_rounding(outcome: Outcome) -> None:
    for leader in outcome.leaders:
        for position, logprobs in zip(leader.positions, leader.logprobs, strict=True):
            torch.testing.assert_close(logprobs, outcome.dense.logprobs[position], rtol=0, atol=0.02)


def test_updates_are_those_of_float32_but_for_rounding(outcome: Outcome, matrix: Matrix) -> None:
    metrics = {name: metric.value for name, metric in outcome.metrics("update").items()}
    dense = outcome.dense.updates
    assert metrics["loss"] == pytest.approx(np.mean([update.loss for update in dense]), abs=1e-3)
    assert metrics["grad_norm"] == pytest.approx(np.mean([update.grad_norm for update in dense]), rel=5e-3)
    assert metrics["lr"] == LEARNING_RATES[-1]
    # The second of three updates without an overflow doubles the scale.
    scaling = {name: metrics[name] for name in ("loss_scale", "skipped_updates", "skipped_in_a_row")}
    assert scaling == {"loss_scale": 2048.0, "skipped_updates": 0.0, "skipped_in_a_row": 0.0}
    start = outcome.loader.from_pretrained(matrix.model(outcome.case), dtype=torch.float32).state_dict()
    gaps, moves = [], []
    for name, weight in outcome.exported.items():
        gaps.append((weight - outcome.dense.weights[name]).abs().flatten())
        moves.append((start[name] - outcome.dense.weights[name]).abs().flatten())
    assert torch.cat(gaps).mean() < 0.05 * torch.cat(moves).mean()


def test_the_watch_sees_gradients_without_the_scale(outcome: Outcome) -> None:
    measured = merge(leader.update.measured for leader in outcome.leaders)
    assert measured[Measured.loss_gradient_error].value < 2e-5
    assert measured[Measured.loss_error].value < 2e-5
    assert measured[Measured.num_updates].value == 3
    assert measured[Measured.optimizer_step_gap].value == measured[Measured.moment_excess].value == 0.0


def outlier_batch() -> dict[str, Any]:
    """Of two updates; a gradient of the first one's first sample, on one rank, is beyond float16."""
    batch = random_batch(16)
    batch["tags"]["advantage"][0] = 1e9
    return batch


def train_with_outlier(coordinates: Coordinates, cfg: PolicyConfig, export: str) -> dict[str, float] | None:
    """Two updates, and the export of the weights; what a leader reports."""
    plane = InMemoryDataPlane()
    worker = ready_worker(cfg, loss_config(), coordinates, plane)
    meta = put_samples(plane, "step", outlier_batch())
    sizes = {"num_shards": coordinates.layout.dp, "global_batch_size": 8}
    scoring = shard_for_logprobs(meta, strategy=logprob_strategy(cfg), **sizes)[coordinates.dp]
    worker.compute_logprobs(scoring, [PREV_LOGPROBS])
    update = worker.train(shard_for_training(meta, strategy=train_strategy(cfg), **sizes)[coordinates.dp])
    worker.export_hf(export)
    return None if update is None else reported(update.metrics) | reported(update.measured)


def reported(metrics: Mapping[str, Metric]) -> dict[str, float]:
    return {str(name): metric.value for name, metric in metrics.items()}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"dp": 2, **FLOAT16}, id="DP2"),
        pytest.param({"ep": 2, "dp": 2, **FLOAT16, **REPLICATED}, id="EP2, two optimizers"),
        pytest.param({"dp": 2, **FSDP}, id="FSDP, DP2"),
        pytest.param({"tp": 2, **FLOAT16}, id="TP2", marks=pytest.mark.slow),
        pytest.param({"pp": 2, **FLOAT16}, id="PP2", marks=pytest.mark.slow),
        pytest.param({"tp": 2, **FLOAT16, **ADAPTERS}, id="adapters, TP2", marks=pytest.mark.slow),
        pytest.param({"tp": 2, **FSDP}, id="FSDP, TP2", marks=pytest.mark.slow),
    ],
)
def test_an_update_whose_gradients_overflow_on_one_rank_is_skipped_by_all(
    options: dict[str, Any], tmp_path: Path
) -> None:
    model = make_checkpoint(tmp_path / "model", "qwen3_moe" if "ep" in options else "qwen3")
    cfg = policy_config(model, **options)
    found = run_world(train_with_outlier, parallel_layout(cfg), cfg, str(tmp_path / "export"))
    for report in filter(None, found):
        assert report["skipped_updates"] == 1.0
        assert report["skipped_in_a_row"] == 0.0
        assert report["loss_scale"] == 512.0
        # The schedule and the optimizer count the other update alone.
        assert report["lr"] == LEARNING_RATES[0]
        assert report["num_updates"] == 1.0
        assert report["optimizer_step_gap"] == 0.0
        assert math.isfinite(report["grad_norm"])
        assert report["loss_gradient_error"] < 2e-5
    dense = DenseReference(cfg, loss_config(), 1.0)
    start = {name: weight.clone() for name, weight in dense.weights().items()}
    prev = [logprobs.detach() for logprobs in dense.logprobs(outlier_batch())]
    dense.update(outlier_batch(), list(range(8, 16)), prev, None, LEARNING_RATES[0])
    expected = dense.weights()
    exported = dense.loader.from_pretrained(tmp_path / "export", dtype=torch.float32).state_dict()
    gap, moved = (
        torch.cat([(one[name] - expected[name]).abs().flatten() for name in expected]).mean()
        for one in (exported, start)
    )
    assert gap < 0.1 * moved + 3e-5  # the export is rounded to float16


def overflow_always(coordinates: Coordinates, cfg: PolicyConfig, export: str) -> dict[str, float] | None:
    cfg = deepcopy(cfg)
    cfg.loss_scaling.initial_loss_scale = 2.0**60
    return train_with_outlier(coordinates, cfg, export)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(FLOAT16, id="megatron"),
        pytest.param(FSDP, id="fsdp"),
        pytest.param({**FLOAT16, **REPLICATED, **MUON}, id="megatron, Muon", marks=pytest.mark.slow),
        pytest.param({**FSDP, **MUON}, id="fsdp, Muon", marks=pytest.mark.slow),
    ],
)
def test_a_phase_without_an_update_leaves_the_weights_as_they_were(
    options: dict[str, Any], tmp_path: Path
) -> None:
    model = make_checkpoint(tmp_path / "model")
    cfg = policy_config(model, **options)
    (report,) = run_world(overflow_always, parallel_layout(cfg), cfg, str(tmp_path / "export"))
    assert report is not None
    assert report["loss_scale"] == 2.0**58
    assert report["skipped_updates"] == report["skipped_in_a_row"] == 2.0
    assert report["num_updates"] == report["weights_moved"] == 0.0
    assert not report.keys() & {"grad_norm", "lr"}
    start, end = (load_file(path / "model.safetensors") for path in (model, tmp_path / "export"))
    assert all(torch.equal(end[name], weight.half()) for name, weight in start.items())
