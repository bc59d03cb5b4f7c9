"""Gradients that are written out, against those that autograd finds by differences."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from nemo_like.policy.megatron.functions import RMSNormFunction, SwiGLUFunction


@pytest.mark.parametrize("shape", [(3, 4), (2, 3, 4, 6)])
def test_rms_norm_has_the_values_and_the_gradient_of_its_formula(shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    hidden = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(shape[-1], dtype=torch.float64, requires_grad=True)
    expected = functional.rms_norm(hidden, shape[-1:], weight, 0.1)
    torch.testing.assert_close(RMSNormFunction.apply(hidden, weight, 0.1), expected)
    assert torch.autograd.gradcheck(lambda *values: RMSNormFunction.apply(*values, 0.1), (hidden, weight))


def test_rms_norm_of_zeros_and_of_no_tokens_is_finite() -> None:
    weight = torch.ones(4, requires_grad=True)
    for shape in ((2, 4), (0, 4)):
        hidden = torch.zeros(shape, requires_grad=True)
        RMSNormFunction.apply(hidden, weight, 1e-6).sum().backward()
        assert hidden.grad is not None and weight.grad is not None
        assert hidden.grad.isfinite().all() and weight.grad.isfinite().all()


def test_swiglu_has_the_values_and_the_gradient_of_its_formula() -> None:
    torch.manual_seed(0)
    halves = torch.randn(3, 2, 10, dtype=torch.float64, requires_grad=True)
    gate, linear = halves.chunk(2, dim=-1)
    torch.testing.assert_close(SwiGLUFunction.apply(halves), gate * gate.sigmoid() * linear)
    assert torch.autograd.gradcheck(SwiGLUFunction.apply, (halves,))
