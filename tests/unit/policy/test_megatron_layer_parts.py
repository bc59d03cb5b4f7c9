"""The parts of layers that some families have, by hand and against PyTorch."""

from __future__ import annotations

import pytest
import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from nemo_like.models.rope import Rope
from nemo_like.policy.megatron.layer_parts import (
    NormThenAdd,
    TorchGeGLU,
    WholeRMSNorm,
    angles_of,
    clamped_swiglu,
)
from nemo_like.policy.megatron.modules import TorchRMSNorm


def config(**changes: object) -> TransformerConfig:
    return TransformerConfig(num_layers=1, hidden_size=4, num_attention_heads=2, **changes)


def test_what_a_layer_adds_is_normed_and_the_residual_stream_is_not() -> None:
    add = NormThenAdd(config(layernorm_epsilon=0.0))(True, False)
    output = torch.tensor([[[3.0, 3.0, -3.0, 3.0]]])  # its root mean square is 3
    added = add((output, None), torch.full((1, 1, 4), 10.0), 0.0)
    assert added.tolist() == [[[11.0, 11.0, 9.0, 11.0]]]


def test_a_norm_may_multiply_by_one_more_than_its_weight() -> None:
    """In bfloat16 too, where 1 + 2^-8 would be 1: 1.5 x (1 + 2^-8) is nearer to 1.5078125 than to 1.5."""
    norm = TorchRMSNorm(config(layernorm_zero_centered_gamma=True), 5, eps=0.0).to(torch.bfloat16)
    norm.weight.data = torch.tensor([2**-8, 1.0, 0.0, 0.0, 0.0], dtype=torch.bfloat16)
    hidden = torch.tensor([[3.0, 3.0, 1.0, 1.0, 0.0]], dtype=torch.bfloat16)  # the root mean square is 2
    normed = norm(hidden)
    assert normed.tolist() == [[1.5078125, 3.0, 0.5, 0.5, 0.0]] and normed.dtype is torch.bfloat16
    normed.sum().backward()
    assert norm.weight.grad is not None and norm.weight.grad.tolist() == [1.5, 1.5, 0.5, 0.5, 0.0]


def test_the_gates_gelu_is_the_one_with_tanh() -> None:
    activated = TorchGeGLU(config())(torch.tensor([0.0, 1.0, 2.0, 3.0]))
    # 0.5 x (1 + tanh(0.79788 (x + 0.044715 x^3))) of 0 and 1, times 2 and 3
    assert activated.tolist() == pytest.approx([0.0, 3 * 0.841192])


def test_a_clamped_swiglu_holds_the_gate_below_7_and_the_rest_within_7() -> None:
    halves = torch.tensor([1.0, 9.0, -9.0, 2.0, -9.0, 9.0], requires_grad=True)
    activated = clamped_swiglu(halves)
    # 1 sigmoid(1.702) (2 + 1), 7 sigmoid(11.914) (-7 + 1), -9 sigmoid(-15.318) (7 + 1)
    assert activated.tolist() == pytest.approx([3 * 0.845796, -42 * 0.9999933, -72 * 2.2258e-7], rel=1e-4)
    activated.sum().backward()
    assert halves.grad is not None
    # Of a value beyond its limit there is none; of the first linear half it is the gate's activation.
    assert [bool(one) for one in halves.grad] == [True, False, True, True, False, False]
    assert halves.grad[3].item() == pytest.approx(0.845796)


def test_a_whole_norm_divides_by_the_root_mean_square_of_all_heads() -> None:
    norm = WholeRMSNorm(config(), 2, eps=0.0, num_heads=2)
    norm.weight.data = torch.tensor([1.0, 2.0, 3.0, 4.0])
    heads = torch.tensor([[1.0, 1.0], [7.0, 7.0]])[None, None]  # the mean square is 25
    assert norm(heads).flatten().tolist() == pytest.approx([0.2, 0.4, 4.2, 5.6])


def test_a_whole_norm_has_the_gradients_of_pytorchs() -> None:
    torch.manual_seed(0)
    norm = WholeRMSNorm(config(), 3, eps=0.1, num_heads=4)
    norm.weight.data.normal_()
    found, heads = [], torch.randn(5, 2, 4, 3, requires_grad=True)

    def expected(values: Tensor) -> Tensor:
        return functional.rms_norm(values.flatten(2), (12,), norm.weight, 0.1).view_as(values)

    for normed in (norm(heads), expected(heads)):
        gradients = torch.autograd.grad((normed * torch.arange(3)).square().sum(), [heads, norm.weight])
        found.append([normed, *gradients])
    torch.testing.assert_close(found[0], found[1])


def test_a_whole_norms_weight_is_no_copy_of_that_of_another_rank() -> None:
    norm = WholeRMSNorm(config(sequence_parallel=True, tensor_model_parallel_size=2), 3, num_heads=4)
    assert norm.weight.shape == (6,) and not norm.weight.sequence_parallel


def test_angles_of_both_kinds_of_layer_lie_one_after_the_other() -> None:
    angles = angles_of((Rope(theta=100.0), Rope(theta=10_000.0, factor=4.0)), 4)
    assert angles.tolist() == pytest.approx([1.0, 0.1, 0.25, 0.0025])


def test_yarn_divides_the_angles_of_pairs_that_turn_seldom() -> None:
    """Of 8 values, pairs 0 to 3 turn 10^4, 10^3, 10^2 and 10 times in 2 pi x 10^4 tokens."""
    rope = Rope(theta=1e4, factor=2.0, trained_length=62_832, beta_fast=700.0, beta_slow=15.0)
    # Kept of pairs 0 and 1, halved of pair 3; pair 2 has the mean of both.
    assert angles_of((rope, rope), 8)[4:].tolist() == pytest.approx([1.0, 0.1, 0.0075, 0.0005])


def test_yarn_may_begin_and_end_between_pairs() -> None:
    """Pair 2 is a third of the way from 1.5 to 3, that of 10^2.5 turns to that of 10."""
    rope = Rope(
        theta=1e4, factor=2.0, trained_length=62_832, beta_fast=316.2278, beta_slow=10.0, rounds=False
    )
    kept = 2 / 3 + 1 / 3 / 2
    assert angles_of((rope, rope), 8)[4:].tolist() == pytest.approx([1.0, 0.1, 0.01 * kept, 0.0005], rel=1e-4)
