"""Experts in one grouped matrix product against a loop over experts, and when they compute so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from nemo_like.policy.megatron.experts import GroupedExperts
from nemo_like.policy.megatron.modules import groups_experts
from nemo_like.policy.options import Device, Precision

NUM_EXPERTS, HIDDEN, FFN = 3, 8, 16


@pytest.fixture(params=[False, True], ids=["no biases", "biases"])
def experts(request: pytest.FixtureRequest) -> GroupedExperts:
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        num_moe_experts=NUM_EXPERTS,
        moe_ffn_hidden_size=FFN,
        use_cpu_initialization=True,
        add_bias_linear=request.param,
    )
    layer = GroupedExperts(NUM_EXPERTS, config, pg_collection=SimpleNamespace(ep=alone, expt_dp=alone))
    torch.manual_seed(2)
    for weight in layer.parameters():
        torch.nn.init.normal_(weight)
    return layer


def one_by_one(layer: GroupedExperts, hidden: Tensor, counts: Tensor, weights: Tensor) -> Tensor:
    outputs, split = [], counts.tolist()
    parameters = dict(layer.named_parameters())
    first, second = (parameters.get(f"linear_fc{one}.bias", torch.zeros(NUM_EXPERTS, 1)) for one in (1, 2))
    for expert, (tokens, scale) in enumerate(zip(hidden.split(split), weights.split(split), strict=True)):
        gate, up = (tokens @ layer.weight1[expert].T + first[expert]).chunk(2, dim=1)
        activated = functional.silu(gate) * up * scale[:, None]
        outputs.append(activated @ layer.weight2[expert].T + second[expert] * scale[:, None])
    return torch.cat(outputs)


def test_every_token_passes_through_its_expert_weighted_by_the_router(experts: GroupedExperts) -> None:
    counts = torch.tensor([4, 0, 3])
    hidden, weights = torch.randn(7, HIDDEN, requires_grad=True), torch.rand(7, requires_grad=True)
    inputs = [hidden, weights, *experts.parameters()]
    output, bias = experts(hidden, counts, weights)
    expected = one_by_one(experts, hidden, counts, weights)
    assert bias is None
    torch.testing.assert_close(output, expected)
    grads, expected_grads = (torch.autograd.grad(each.square().sum(), inputs) for each in (output, expected))
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad)


def test_without_a_single_token_every_expert_still_gets_a_gradient_of_zero(experts: GroupedExperts) -> None:
    """Megatron-core waits for the gradient of every parameter."""
    hidden = torch.randn(0, HIDDEN, requires_grad=True)
    output, _ = experts(hidden, torch.zeros(NUM_EXPERTS, dtype=torch.int64), torch.rand(0))
    assert output.shape == (0, HIDDEN)
    output.sum().backward()
    assert all(not weight.grad.any() for weight in experts.parameters())


def policy(device: Device, precision: Precision, wanted: bool | None, expert_parts: int = 1) -> Any:
    megatron_cfg = SimpleNamespace(moe_grouped_gemm=wanted, expert_tensor_parallel_size=expert_parts)
    return SimpleNamespace(label="policy", device=device, precision=precision, megatron_cfg=megatron_cfg)


@pytest.mark.parametrize(
    ("device", "precision", "has_te", "wanted", "groups"),
    [
        (Device.cpu, Precision.float32, False, None, False),
        (Device.cpu, Precision.float32, False, True, True),
        (Device.cuda, Precision.bfloat16, False, None, True),
        (Device.cuda, Precision.bfloat16, False, False, False),
        (Device.cuda, Precision.float32, False, None, False),
        (Device.cuda, Precision.float16, False, None, False),
        (Device.cuda, Precision.float32, True, None, True),
        (Device.cuda, Precision.float32, True, True, True),
    ],
)
def test_experts_are_grouped_where_there_is_a_kernel_for_it(
    device: Device,
    precision: Precision,
    has_te: bool,
    wanted: bool | None,
    groups: bool,
) -> None:
    assert groups_experts(policy(device, precision, wanted), is_fused=has_te) is groups


def test_a_kernel_that_is_asked_for_and_missing_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"moe_grouped_gemm=true .*float32 needs Transformer Engine"):
        groups_experts(policy(Device.cuda, Precision.float32, True), is_fused=False)


@pytest.mark.parametrize(("has_te", "groups"), [(False, False), (True, True)])
def test_parts_of_experts_are_grouped_by_transformer_engine_alone(has_te: bool, groups: bool) -> None:
    divided = policy(Device.cuda, Precision.bfloat16, None, expert_parts=2)
    assert groups_experts(divided, is_fused=has_te) is groups
