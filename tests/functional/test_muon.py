"""Every layout of both backends updates by Muon as ``torch.optim.Muon`` does on the matrices of transformers.

The claims are those of ``test_policy_parity``, over this module's cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from nemo_like.policy.options import OptimizerKind, Precision
from tests.functional.test_fsdp_parity import SAVING, FsdpCase
from tests.functional.test_policy_parity import (
    DYNAMIC,
    FOUR_LAYERS,
    GSPO,
    LEARNING_RATES,
    MIXTURE,
    PACKED,
    SEQUENCE_PARALLEL,
    SHARED,
    TOLERANCE,
    UNTIED,
    Case,
    Matrix,
    Outcome,
    as_params,
    test_exported_weights_equal_the_dense_model_after_its_updates,
    test_tripwires_measure_a_healthy_step_in_every_layout,
)

__all__ = [
    "test_exported_weights_equal_the_dense_model_after_its_updates",
    "test_tripwires_measure_a_healthy_step_in_every_layout",
]

MUON: dict[str, Any] = {"optimizer_kind": OptimizerKind.muon, "use_distributed_optimizer": False}
FSDP: dict[str, Any] = {"backend": "fsdp", **MUON}
GPT_OSS = {"model_type": "gpt_oss", **UNTIED}
CASES = [
    Case("one process", {}, {**MUON, **PACKED}),
    Case("mixture of experts", {}, MUON, MIXTURE, slow=True),
    Case("experts in one matrix product", {}, {**MUON, "moe_grouped_gemm": True}, MIXTURE, slow=True),
    Case("gpt-oss", {}, {**MUON, **PACKED}, GPT_OSS, slow=True),
    Case(
        "gpt-oss, EP2, in one product",
        {"ep": 2, "dp": 2},
        {**MUON, "moe_grouped_gemm": True},
        GPT_OSS,
        slow=True,
    ),
    Case("on the host between phases", {}, {**MUON, "offloads": True, **PACKED}, slow=True),
    Case("TP2", {"tp": 2}, {**MUON, **PACKED}, {"model_type": "qwen2"}, slow=True),
    Case("TP2, one matrix of queries, keys and values", {"tp": 2}, MUON, {"model_type": "phi3"}, slow=True),
    Case("TP2 with sequence parallelism", SEQUENCE_PARALLEL, {**MUON, **SHARED}, {}, GSPO, slow=True),
    Case("experts on every TP rank", SEQUENCE_PARALLEL, MUON, MIXTURE, slow=True),
    Case("experts divided over TP2", {"etp": 2, **SEQUENCE_PARALLEL}, {**MUON, **PACKED}, MIXTURE, slow=True),
    Case("PP2", {"pp": 2}, {**MUON, **DYNAMIC}, slow=True),
    Case("PP2 with two chunks", {"pp": 2, "vpp": 2}, {**MUON, **PACKED}, FOUR_LAYERS, slow=True),
    Case("CP2", {"cp": 2}, {**MUON, **PACKED}, slow=True),
    Case("DP2", {"dp": 2}, {**MUON, **DYNAMIC}, UNTIED, slow=True),
    Case("EP2", {"ep": 2, "dp": 2}, {**MUON, **PACKED}, MIXTURE, slow=True),
    Case(
        "EP2, experts in one matrix product",
        {"ep": 2, "dp": 2},
        {**MUON, "moe_grouped_gemm": True},
        MIXTURE,
        slow=True,
    ),
    Case("FSDP, one process", {}, {**FSDP, **PACKED}),
    Case("FSDP, mixture of experts, DP2", {"dp": 2}, {**FSDP, **PACKED}, MIXTURE, slow=True),
    Case("FSDP, gpt-oss, DP2", {"dp": 2}, FSDP, GPT_OSS, slow=True),
    Case("FSDP, DP2", {"dp": 2}, {**FSDP, **DYNAMIC}, slow=True),
    Case("FSDP, on the host between phases, DP2", {"dp": 2}, {**FSDP, "offloads": True}, slow=True),
    FsdpCase("FSDP, recomputed and offloaded, DP2", {"dp": 2}, {**MUON, **PACKED}, fsdp=SAVING, slow=True),
    Case("FSDP, TP2", {"tp": 2}, FSDP, UNTIED, slow=True),
    Case("FSDP, one matrix of queries, keys and values", {}, FSDP, {"model_type": "phi3"}, slow=True),
    Case("FSDP, TP2 x DP2", {"tp": 2, "dp": 2}, {**FSDP, **SHARED}, {}, GSPO, slow=True),
    Case("FSDP, CP2", {"cp": 2}, {**FSDP, **PACKED}, slow=True),
]


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    with Matrix(CASES, tmp_path_factory.mktemp("muon")) as matrix:
        yield matrix


@pytest.fixture(scope="module", params=as_params(CASES), ids=lambda case: case.name)
def outcome(request: pytest.FixtureRequest, matrix: Matrix) -> Outcome:
    return matrix.outcome(request.param)


def test_loss_gradient_norm_and_learning_rate_are_those_of_torch(outcome: Outcome) -> None:
    metrics = {name: metric.value for name, metric in outcome.metrics("update").items()}
    dense = outcome.dense.updates
    expected = {
        "loss": np.mean([update.loss for update in dense]),
        "grad_norm": np.mean([update.grad_norm for update in dense]),
        "lr": LEARNING_RATES[-1],
    }
    found = {name: metrics[name] for name in expected}
    assert found == pytest.approx(expected, abs=TOLERANCE, rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "options"), [({"tp": 2}, MUON), ({"dp": 2}, FSDP)], ids=["TP2", "FSDP, DP2"]
)
def test_in_half_precision_matrices_move_as_in_float32_but_for_rounding(
    layout: dict[str, Any], options: dict[str, Any], tmp_path: Path
) -> None:
    """Weights round to float16, and the iteration to bfloat16."""
    case = Case("half", layout, {**options, "precision": Precision.float16})
    with Matrix([case], tmp_path) as matrix:
        half = matrix.outcome(case)
        start = half.loader.from_pretrained(matrix.model(case), dtype=torch.float32).state_dict()
    gaps, moves = (
        torch.cat([(weight - other[name]).abs().flatten() for name, weight in half.dense.weights.items()])
        for other in (half.exported, start)
    )
    assert gaps.mean() < 0.1 * moves.mean()
