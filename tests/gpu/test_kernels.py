"""A step with the kernels of GPUs against the same step without them: log-probs, updates, weights.

On the CPU, where most kernels have no counterpart, stand-ins of the same signature are called in their place,
so that the tests are tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.nn.attention import varlen

from nemo_like.cluster.coordinates import Coordinates
from nemo_like.policy.groups.parallelism import parallel_layout
from nemo_like.policy.options import Device, Precision
from tests.functional.policy_fixtures import (
    ALL_EXPERTS,
    MicroBatching,
    loss_config,
    make_checkpoint,
    policy_config,
    random_batch,
)
from tests.functional.test_policy_parity import NUM_SAMPLES, RankReport, Step, run_steps
from tests.functional.worlds import run_world
from tests.unit.policy.varlen_by_hand import loops_over_sequences

MEGATRON, FSDP = "nemo_like.policy.megatron.modules", "nemo_like.policy.fsdp.attention"
PACKED = {"micro_batching": MicroBatching.packed}
# Nats, and shares of the norms: rounding of float32, and of bfloat16 with its 8 bits.
TOLERANCES = {Precision.float32: 1e-4, Precision.bfloat16: 0.1, Precision.float16: 0.02}


def yes(query: torch.Tensor) -> bool:
    """In place of ``has_varlen_kernel``."""
    return True


def no(query: torch.Tensor) -> bool:
    return False


@dataclass(frozen=True)
class Way:
    """One way to compute a step: options of ``policy_config``, and what is replaced in the worker's process,
    by module and name."""

    options: Mapping[str, Any] = field(default_factory=dict)
    replaced: Mapping[tuple[str, str], Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    name: str
    device: Device
    precision: Precision
    fast: Way
    plain: Way
    model_type: str = "qwen3"
    needs_transformer_engine: bool = False


WITHOUT_TE = {(MEGATRON, "HAVE_TE"): False}
GROUPED = {"moe_grouped_gemm": True, **PACKED}
SEQUENTIAL = {"moe_grouped_gemm": False, **PACKED}
FSDP_PACKED = {"backend": "fsdp", **PACKED}
LOOP = {(MEGATRON, "has_varlen_kernel"): no, (FSDP, "has_varlen_kernel"): no}
STAND_IN = {
    (MEGATRON, "has_varlen_kernel"): yes,
    (FSDP, "has_varlen_kernel"): yes,
    (varlen.__name__, "varlen_attn"): loops_over_sequences,
}
CPU_CASES = [
    Case(f"packed attention, {name}", Device.cpu, precision, Way(options, STAND_IN), Way(options, LOOP))
    for name, options in {"Megatron-core": PACKED, "FSDP": FSDP_PACKED}.items()
    for precision in Precision
] + [
    Case("grouped experts", Device.cpu, precision, Way(GROUPED), Way(SEQUENTIAL), "qwen3_moe")
    for precision in Precision
]
HALF = (Device.cuda, Precision.bfloat16)
GPU_CASES = [
    Case(
        "packed attention, Megatron-core", *HALF, Way(PACKED, WITHOUT_TE), Way(PACKED, {**WITHOUT_TE, **LOOP})
    ),
    Case("packed attention with sinks", *HALF, Way(PACKED), Way(PACKED, LOOP), "gpt_oss"),
    Case("packed attention, FSDP", *HALF, Way(FSDP_PACKED), Way(FSDP_PACKED, LOOP)),
    Case(
        "PyTorch's grouped experts",
        *HALF,
        Way(GROUPED, WITHOUT_TE),
        Way(SEQUENTIAL, WITHOUT_TE),
        "qwen3_moe",
    ),
    Case(
        "Transformer Engine's grouped experts",
        *HALF,
        Way(GROUPED),
        Way(SEQUENTIAL),
        "qwen3_moe",
        needs_transformer_engine=True,
    ),
    *(
        Case(
            f"Transformer Engine, {model_type}, {micro_batching.value}",
            *HALF,
            Way({"micro_batching": micro_batching}),
            Way({"micro_batching": micro_batching}, WITHOUT_TE),
            model_type,
            needs_transformer_engine=True,
        )
        for model_type in ("qwen3", "qwen2", "qwen3_moe")
        for micro_batching in (MicroBatching.padded, MicroBatching.packed)
    ),
]


def step_in(coordinates: Coordinates, step: Step, replaced: Mapping[tuple[str, str], Any]) -> RankReport:
    with pytest.MonkeyPatch.context() as patch:
        for (module, name), stand_in in replaced.items():
            patch.setattr(import_module(module), name, stand_in)
        (report,) = run_steps(coordinates, [step])
    return report


def reported(case: Case, way: Way, model: Path, path: Path) -> tuple[RankReport, dict[str, torch.Tensor]]:
    """What the worker reports, and the weights that it exports after its updates."""
    cfg = policy_config(model, device=case.device, precision=case.precision, **way.options)
    step = Step(cfg, loss_config(kl_penalty=0.1), random_batch(NUM_SAMPLES), str(path))
    (report,) = run_world(step_in, parallel_layout(cfg), step, way.replaced, device=case.device)
    weights = {
        name: tensor
        for file in sorted(path.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    return report, weights


@pytest.mark.parametrize(
    "case",
    [
        *(
            pytest.param(case, marks=[pytest.mark.slow] if case.precision is not Precision.float32 else [])
            for case in CPU_CASES
        ),
        *(pytest.param(case, marks=pytest.mark.gpu) for case in GPU_CASES),
    ],
    ids=lambda case: f"{case.name}, {case.precision.value}, {case.device.value}",
)
def test_a_kernel_computes_what_is_computed_without_it(case: Case, tmp_path: Path) -> None:
    if case.needs_transformer_engine:
        pytest.importorskip("transformer_engine", reason="Transformer Engine is not installed")
    model = make_checkpoint(tmp_path / "model", case.model_type, **ALL_EXPERTS.get(case.model_type, {}))
    fast, fast_weights = reported(case, case.fast, model, tmp_path / "fast")
    plain, plain_weights = reported(case, case.plain, model, tmp_path / "plain")
    tolerance = TOLERANCES[case.precision]
    assert fast.logprobs is not None
    assert plain.logprobs is not None
    torch.testing.assert_close(torch.cat(fast.logprobs), torch.cat(plain.logprobs), rtol=0, atol=tolerance)
    for name in ("loss", "grad_norm"):
        assert metric(fast, name) == pytest.approx(metric(plain, name), rel=tolerance, abs=tolerance)
    assert fast_weights.keys() == plain_weights.keys()
    for name, weight in fast_weights.items():
        expected = plain_weights[name].float()
        difference = (weight.float() - expected).norm() / expected.norm()
        assert difference < tolerance, f"{name} differs by {difference:.1e}"


def metric(report: RankReport, name: str) -> float:
    assert report.update is not None
    return float(report.update.metrics[name].value)
