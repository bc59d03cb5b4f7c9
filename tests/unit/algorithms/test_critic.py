"""The head of a critic, and its loss: where clipping takes the gradient away, and where it does not."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.algorithms.critic import TokenValues, linear_values, value_loss


def losses(
    values: list[float], old: list[float], returns: list[float], clip_range: float | None
) -> tuple[list[float], list[float], list[float]]:
    """Loss, gradient and whether it is clipped, by token."""
    current = torch.tensor(values, requires_grad=True)
    terms = value_loss(current, torch.tensor(old), torch.tensor(returns), clip_range=clip_range)
    terms.per_token.sum().backward()
    assert not terms.is_clipped.requires_grad
    return terms.per_token.tolist(), current.grad.tolist(), terms.is_clipped.tolist()


def test_without_clipping_it_is_half_the_squared_error() -> None:
    loss, gradient, is_clipped = losses([1.0, 2.0, -3.0], [9.0, -9.0, 0.0], [0.0, 4.0, -3.0], None)
    assert loss == [0.5, 2.0, 0.0]
    assert gradient == [1.0, -2.0, 0.0]
    assert is_clipped == [0, 0, 0]


@pytest.mark.parametrize("sign", [1, -1])
def test_a_value_that_went_too_far_towards_its_return_has_no_gradient(sign: int) -> None:
    # From 0 to 0.5 on the way to 1, where only 0.2 counts: the error that counts is 0.8.
    loss, gradient, is_clipped = losses([0.5 * sign], [0.0], [1.0 * sign], 0.2)
    assert loss == pytest.approx([0.32])
    assert gradient == [0.0]
    assert is_clipped == [1]


@pytest.mark.parametrize("sign", [1, -1])
def test_a_value_that_went_too_far_the_wrong_way_is_pulled_back(sign: int) -> None:
    # From 0 to 0.5, away from -1: the whole error of 1.5 counts, not the 1.2 of what is clipped.
    loss, gradient, is_clipped = losses([0.5 * sign], [0.0], [-1.0 * sign], 0.2)
    assert loss == pytest.approx([1.125])
    assert gradient == pytest.approx([1.5 * sign])
    assert is_clipped == [0]


def test_a_value_that_went_far_past_its_return_is_pulled_back() -> None:
    # From 0 to 1, past 0.3: 0.7 too far, where the clipped value is 0.1 short.
    loss, gradient, is_clipped = losses([1.0], [0.0], [0.3], 0.2)
    assert loss == pytest.approx([0.245])
    assert gradient == pytest.approx([0.7])
    assert is_clipped == [0]


@given(st.floats(-5, 5, width=32), st.floats(-0.19, 0.19), st.floats(-5, 5, width=32))
def test_within_the_range_clipping_changes_nothing(old: float, move: float, target: float) -> None:
    value = old + move
    loss, gradient, is_clipped = losses([value], [old], [target], 0.2)
    plain, plain_gradient, _ = losses([value], [old], [target], None)
    assert loss == pytest.approx(plain, rel=1e-5, abs=1e-5)
    assert gradient == pytest.approx(plain_gradient, rel=1e-5, abs=1e-5)
    assert is_clipped == [0]


@given(*[st.floats(-5, 5, width=32)] * 3, st.floats(0.01, 2))
def test_clipping_never_lowers_the_loss(value: float, old: float, target: float, clip_range: float) -> None:
    (loss,), (gradient,), (is_clipped,) = losses([value], [old], [target], clip_range)
    (plain,), (plain_gradient,), _ = losses([value], [old], [target], None)
    assert loss >= plain
    if is_clipped:
        assert gradient == 0
        assert loss > plain
    elif abs(abs(value - old) - clip_range) > 1e-3:
        assert gradient == pytest.approx(plain_gradient, rel=1e-5, abs=1e-5)


def test_a_value_is_the_heads_product_with_the_hidden_state_in_float32() -> None:
    # In bfloat16 256 + 1 would be 256.
    hidden = torch.tensor([[256.0, 1.0], [2.0, -1.0]], dtype=torch.bfloat16)
    found = linear_values(hidden, torch.tensor([[1.0, 1.0]], dtype=torch.bfloat16)).values
    assert found.dtype == torch.float32
    assert found.tolist() == [257.0, 1.0]


def test_values_are_made_anew_of_their_tensors() -> None:
    values = TokenValues(torch.tensor([1.0, 2.0]))
    assert TokenValues.of(values.tensors) == values
