from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from nemo_like.policy.backends.muon import Muon, check_kind, of_stacked, orthogonalised
from nemo_like.policy.options import OptimizerKind

ONE_STEP = Muon(momentum=0.9, nesterov=True, ns_steps=1, scale=0.2, dtype=torch.float32)


def random_matrix(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))


@pytest.mark.parametrize(("rows", "columns"), [(16, 16), (48, 16), (8, 40), (1, 24)])
def test_in_bfloat16_the_change_is_torchs_to_the_bit(rows: int, columns: int) -> None:
    gradient = random_matrix(rows, columns)
    # From a weight of 0 and without weight decay there is nothing else to round.
    zero = torch.zeros_like(gradient)
    zero.grad = gradient
    torch.optim.Muon([zero], lr=1.0, weight_decay=0.0, adjust_lr_fn="match_rms_adamw").step()
    ours, momentum = torch.zeros_like(gradient), torch.zeros_like(gradient)
    rule = Muon(momentum=0.95, nesterov=True, ns_steps=5, scale=0.2, dtype=torch.bfloat16)
    rule.update(ours, gradient, momentum, lambda part, function: function(part), rate=1.0, decay=0.0)
    torch.testing.assert_close(ours, zero, rtol=1e-6, atol=0)


def test_one_iteration_is_a_polynomial_of_the_singular_values() -> None:
    # 3 and 4 are 0.6 and 0.8 of the norm 5, of which 3.4445 x - 4.775 x^3 + 2.0315 x^5 makes these.
    found = ONE_STEP.direction(torch.diag(torch.tensor([3.0, 4.0])))
    expected = 0.2 * 2**0.5 * torch.diag(torch.tensor([1.19327, 0.97648]))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_five_iterations_leave_singular_values_near_1() -> None:
    values = torch.linalg.svdvals(orthogonalised(random_matrix(24, 40), 5))
    assert 0.6 < float(values.min()) < float(values.max()) < 1.25


def test_a_matrix_without_a_gradient_does_not_move() -> None:
    assert not ONE_STEP.direction(torch.zeros(3, 4)).any()


@pytest.mark.parametrize(("nesterov", "blend"), [(True, 0.19), (False, 0.1)])
def test_the_mean_of_the_gradients_is_what_moves_a_weight(nesterov: bool, blend: float) -> None:
    weight, momentum = torch.tensor([[2.0]]), torch.zeros(1, 1)
    rule = Muon(momentum=0.9, nesterov=nesterov, ns_steps=5, scale=0.2, dtype=torch.float32)
    rule.update(weight, torch.ones(1, 1), momentum, lambda part, function: part, rate=0.1, decay=0.5)
    assert float(momentum) == pytest.approx(0.1)
    assert float(weight) == pytest.approx(2.0 * 0.95 - 0.1 * blend)


def test_each_matrix_of_a_stack_is_on_its_own() -> None:
    stack = torch.stack([random_matrix(12, 8), random_matrix(12, 8) ** 3])
    found = of_stacked(stack, 2, ONE_STEP.direction)
    expected = [torch.cat([ONE_STEP.direction(half) for half in expert.chunk(2)]) for expert in stack]
    torch.testing.assert_close(found, torch.stack(expected))


def test_a_checkpoint_of_another_kind_is_refused_by_name() -> None:
    own = OptimizerKind.muon
    check_kind(Path("c"), own, own, "value")
    with pytest.raises(
        ValueError, match=r"checkpoint c was saved with value.optimizer.kind=adamw, and this is"
    ):
        check_kind(Path("c"), OptimizerKind.adamw, own, "value")
