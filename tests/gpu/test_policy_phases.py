"""A policy worker's phases on one device: log-probs, updates, export, without Ray and without vLLM.

The cases marked gpu need a CUDA device. Those on the CPU run the same lines, so that the tests
themselves are tested where there is no GPU.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nemo_like.algorithms.options import LossConfig
from nemo_like.policy.groups.parallelism import parallel_layout
from nemo_like.policy.options import BACKEND_KINDS, Device, OptimizerKind, PolicyConfig, Precision
from tests.functional.dense_reference import DenseReference
from tests.functional.image_models import DenseImageReference, image_batch
from tests.functional.image_models import make_checkpoint as make_vlm_checkpoint
from tests.functional.policy_fixtures import (
    ALL_EXPERTS,
    MicroBatching,
    loss_config,
    make_checkpoint,
    policy_config,
    random_batch,
)
from tests.functional.test_forests import ForestReference, branched_batch
from tests.functional.test_policy_parity import (
    GLOBAL_BATCH_SIZE,
    LEARNING_RATES,
    NUM_SAMPLES,
    TEMPERATURE,
    RankReport,
    Step,
    run_steps,
)
from tests.functional.worlds import run_world

# Nats, and shares of the norms: rounding of float32 kernels, and of bfloat16 with its 8 bits.
TOLERANCES = {Precision.float32: 1e-3, Precision.bfloat16: 0.15, Precision.float16: 0.03}


@dataclass(frozen=True)
class Case:
    """One backend's way through a step. ``options`` are of fsdp_cfg; layers of ``adapts`` have adapters. A
    model of ``images`` reads prompts and observations with images. Samples that are ``branched`` are forests
    of runs of tokens."""

    backend: str
    precision: Precision
    micro_batching: MicroBatching
    device: Device
    options: tuple[tuple[str, Any], ...] = ()
    adapts: tuple[str, ...] = ()
    images: str = ""
    family: str = "qwen3"
    branched: bool = False
    optimizer: OptimizerKind = OptimizerKind.adamw

    @property
    def name(self) -> str:
        parts = [self.backend, self.precision.value, self.micro_batching.value, self.device.value]
        parts += [*(name for name, _ in self.options), *self.adapts, *self.images.split()]
        parts += [self.family] * (self.family != "qwen3") + ["forests"] * self.branched
        return ", ".join(parts + [self.optimizer.value] * (self.optimizer is not OptimizerKind.adamw))

    @property
    def reference(self) -> type[DenseReference]:
        if self.branched:
            return ForestReference
        return DenseImageReference if self.images else DenseReference

    def model(self, path: Path) -> Path:
        if self.images:
            return make_vlm_checkpoint(path, self.images)
        return make_checkpoint(path, self.family, **ALL_EXPERTS.get(self.family, {}))

    def batch(self) -> dict[str, Any]:
        if self.branched:
            return branched_batch()
        return image_batch((1, 2, 0, 1, 0, 2)) if self.images else random_batch(NUM_SAMPLES)

    def config(self, model: Path) -> PolicyConfig:
        cfg = policy_config(
            model,
            backend=self.backend,
            precision=self.precision,
            micro_batching=self.micro_batching,
            device=self.device,
            adapts=self.adapts,
            optimizer_kind=self.optimizer,
            use_distributed_optimizer=self.optimizer is OptimizerKind.adamw,
        )
        return replace(cfg, fsdp_cfg=replace(cfg.fsdp_cfg, **dict(self.options)))


ADAPTED = ("all-linear",)
SAVING = (("activation_checkpointing", True), ("cpu_offload", True))


def further_cases(device: Device) -> list[Case]:
    """Forests, families with layers that Qwen3 has not, and Muon."""
    of_forests = [
        Case(backend, Precision.bfloat16, MicroBatching.shared, device, family=family, branched=True)
        for backend, family in (("megatron", "gemma3_text"), ("fsdp", "qwen3"))
    ]
    of_families = [
        Case("megatron", Precision.bfloat16, MicroBatching.packed, device, family=family)
        for family in ("deepseek_v3", "gemma3_text", "glm4_moe", "gpt_oss")
    ]
    of_muon = [
        Case(backend, Precision.bfloat16, MicroBatching.packed, device, optimizer=OptimizerKind.muon)
        for backend in BACKEND_KINDS.names()
    ]
    return [*of_forests, *of_families, *of_muon]


QUICK_CPU_CASE, *FURTHER_CPU_CASES = further_cases(Device.cpu)
CPU_CASES = [
    Case("fsdp", Precision.bfloat16, MicroBatching.packed, Device.cpu),
    Case("megatron", Precision.bfloat16, MicroBatching.packed, Device.cpu),
    Case("megatron", Precision.bfloat16, MicroBatching.shared, Device.cpu),
    QUICK_CPU_CASE,
]
SLOW_CPU_CASES = [
    Case("megatron", Precision.bfloat16, MicroBatching.packed, Device.cpu, adapts=ADAPTED),
    Case("fsdp", Precision.bfloat16, MicroBatching.shared, Device.cpu, images="qwen3_vl"),
    *FURTHER_CPU_CASES,
]
GPU_CASES = [
    Case(backend, precision, micro_batching, Device.cuda)
    for backend in BACKEND_KINDS.names()
    for precision in Precision
    for micro_batching in MicroBatching
    # On a GPU prompts are shared in half precision.
    if (precision, micro_batching) != (Precision.float32, MicroBatching.shared)
] + [
    Case("fsdp", Precision.bfloat16, MicroBatching.packed, Device.cuda, SAVING),
    *(
        Case(backend, precision, MicroBatching.packed, Device.cuda, adapts=ADAPTED)
        for backend in BACKEND_KINDS.names()
        for precision in Precision
    ),
    *(
        Case("fsdp", precision, micro_batching, Device.cuda, images=images)
        for images in ("qwen2_5_vl", "qwen3_vl")
        for precision, micro_batching in (
            (Precision.float32, MicroBatching.packed),
            (Precision.bfloat16, MicroBatching.packed),
            (Precision.bfloat16, MicroBatching.shared),
        )
    ),
    *further_cases(Device.cuda),
]


@dataclass(frozen=True)
class Outcome:
    """One step of the worker beside the dense float32 reference on the CPU."""

    case: Case
    report: RankReport
    exported: dict[str, torch.Tensor]
    dense_logprobs: list[torch.Tensor]
    dense_losses: list[float]
    dense_grad_norms: list[float]
    dense_weights: dict[str, torch.Tensor]


@pytest.fixture(
    scope="module",
    params=[
        *CPU_CASES,
        *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_CPU_CASES),
        *(pytest.param(case, marks=pytest.mark.gpu) for case in GPU_CASES),
    ],
    ids=lambda case: case.name,
)
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    case, path = request.param, tmp_path_factory.mktemp("phases")
    cfg = case.config(case.model(path / "model"))
    loss, batch = loss_config(kl_penalty=0.1), case.batch()
    step = Step(cfg, loss, batch, str(path / "export"))
    ((report,),) = run_world(run_steps, parallel_layout(cfg), [step], device=case.device)
    return _beside_dense(case, cfg, loss, batch, report, path / "export")


def _beside_dense(
    case: Case, cfg: PolicyConfig, loss: LossConfig, batch: dict[str, Any], report: RankReport, export: Path
) -> Outcome:
    dense = case.reference(cfg, loss, TEMPERATURE)
    prev = [logprobs.detach() for logprobs in dense.logprobs(batch)]
    updates = [
        dense.update(batch, list(range(first, first + GLOBAL_BATCH_SIZE)), prev, prev, rate)
        for first, rate in zip(range(0, NUM_SAMPLES, GLOBAL_BATCH_SIZE), LEARNING_RATES, strict=True)
    ]
    return Outcome(
        case,
        report,
        case.reference.loader.from_pretrained(export).state_dict(),
        prev,
        [update.loss for update in updates],
        [update.grad_norm for update in updates],
        dense.weights(),
    )


def test_logprobs_are_those_of_the_dense_model(outcome: Outcome) -> None:
    tolerance = TOLERANCES[outcome.case.precision]
    for position, logprobs in zip(outcome.report.positions, outcome.report.logprobs, strict=True):
        torch.testing.assert_close(logprobs, outcome.dense_logprobs[position], rtol=0, atol=tolerance)


def test_updates_report_the_dense_loss_and_gradient_norm(outcome: Outcome) -> None:
    tolerance = TOLERANCES[outcome.case.precision]
    metrics = {name: metric.value for name, metric in outcome.report.update.metrics.items()}
    mean_loss = sum(outcome.dense_losses) / len(outcome.dense_losses)
    mean_norm = sum(outcome.dense_grad_norms) / len(outcome.dense_grad_norms)
    assert metrics["loss"] == pytest.approx(mean_loss, abs=tolerance)
    assert metrics["grad_norm"] == pytest.approx(mean_norm, rel=tolerance)
    assert all(math.isfinite(value) for value in metrics.values())


def test_the_export_has_the_updated_weights_in_the_configured_precision(outcome: Outcome) -> None:
    tolerance = TOLERANCES[outcome.case.precision]
    assert outcome.exported.keys() == outcome.dense_weights.keys()
    for name, weight in outcome.exported.items():
        # transformers reads the biases by which routers choose in float32, whatever the file has.
        precision = "float32" if name.endswith("correction_bias") else outcome.case.precision.value
        assert str(weight.dtype) == f"torch.{precision}"
        expected = outcome.dense_weights[name]
        difference = (weight.float() - expected).norm() / expected.norm()
        assert difference < tolerance, f"{name} differs by {difference:.1e}"
