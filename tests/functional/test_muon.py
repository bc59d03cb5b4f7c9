"""Every layout of both backends updates by Muon as ``torch.optim.Muon`` does on the matrices of transformers.

The claims are those of ``test_policy_parity``, over this module's cases.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from nemo_like.algorithms.options import SurrogateLossConfig
from nemo_like.policy.options import OptimizerConfig, OptimizerKind, PolicyConfig
from tests.functional.dense_reference import DenseReference
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
CASES = [
    Case("one process", {}, {**MUON, **PACKED}),
    Case("mixture of experts", {}, MUON, MIXTURE, slow=True),
    Case("experts in one matrix product", {}, {**MUON, "moe_grouped_gemm": True}, MIXTURE, slow=True),
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
    Case("FSDP, DP2", {"dp": 2}, {**FSDP, **DYNAMIC}, slow=True),
    Case("FSDP, on the host between phases, DP2", {"dp": 2}, {**FSDP, "offloads": True}, slow=True),
    Case("FSDP, TP2", {"tp": 2}, FSDP, UNTIED, slow=True),
    Case("FSDP, one matrix of queries, keys and values", {}, FSDP, {"model_type": "phi3"}, slow=True),
    Case("FSDP, TP2 x DP2", {"tp": 2, "dp": 2}, {**FSDP, **SHARED}, {}, GSPO, slow=True),
    Case("FSDP, CP2", {"cp": 2}, {**FSDP, **PACKED}, slow=True),
]


class TorchMuon:
    """``torch.optim.Muon`` on the matrices of a model's layers, and ``torch.optim.AdamW`` on the rest."""

    def __init__(self, model: torch.nn.Module, adam: torch.optim.Optimizer, cfg: OptimizerConfig) -> None:
        self._adam = adam
        self._matrices = {
            parameter: (name, matrices_of(name, parameter))
            for name, parameter in model.named_parameters()
            if ".layers." in name and parameter.dim() > 1
        }
        for group in adam.param_groups:
            group["params"] = [one for one in group["params"] if one not in self._matrices]
        self._muon = torch.optim.Muon(
            [matrix for _, matrices in self._matrices.values() for matrix in matrices],
            weight_decay=cfg.weight_decay,
            momentum=cfg.muon_momentum,
            nesterov=cfg.muon_nesterov,
            ns_steps=cfg.muon_ns_steps,
            adjust_lr_fn="match_rms_adamw",
        )
        self.param_groups = [*adam.param_groups, *self._muon.param_groups]

    def zero_grad(self) -> None:
        self._adam.zero_grad()
        for parameter in self._matrices:
            parameter.grad = None

    def step(self) -> None:
        """One update; torch's iteration is in float64 and not in bfloat16, whose rounding is a matter of
        chance."""
        self._adam.step()
        for parameter, (name, matrices) in self._matrices.items():
            assert parameter.grad is not None
            for matrix, gradient in zip(matrices, matrices_of(name, parameter.grad), strict=True):
                matrix.grad = gradient.contiguous()
        with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.double):
            self._muon.step()


def matrices_of(name: str, parameter: Tensor) -> list[Tensor]:
    """Views of the matrices of a parameter of transformers: itself, or of each expert what its checkpoint
    has."""
    whole = parameter.detach()
    if whole.dim() == 2:
        return [whole]
    num_blocks = 2 if "gate_up" in name else 1
    return [block for expert in whole for block in expert.chunk(num_blocks)]


class MuonReference(DenseReference):
    def __init__(self, cfg: PolicyConfig, loss: SurrogateLossConfig, temperature: float) -> None:
        super().__init__(cfg, loss, temperature)
        self.optimizer: Any = TorchMuon(self.model, self.optimizer, cfg.optimizer)


class MuonMatrix(Matrix):
    reference = MuonReference


@pytest.fixture(scope="module")
def matrix(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    with MuonMatrix(CASES, tmp_path_factory.mktemp("muon")) as matrix:
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
