"""GAE's equation at every token, and a critic's loss a second time, with numbers worked out by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from nemo_like.algorithms.critic import value_loss
from nemo_like.algorithms.generalised_advantages import generalised_advantages
from nemo_like.tripwires.reference_values import EstimatedTokens, ValuedTokens, estimate_errors, value_terms


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


# A sample of two tokens that ends, and one of one token that goes on with a value of 2; gamma 1, lambda 0.5.
#   sample 1: delta = 0 + 0.5 - 0.25 = 0.25 and 1 - 0.5 = 0.5, so A = 0.25 + 0.25 = 0.5 and 0.5
#   sample 2: A = 0 + 2 - 1 = 1
TOKENS = EstimatedTokens(
    run=torch.tensor([0, 0, 1]),
    values=numbers(0.25, 0.5, 1.0),
    advantages=numbers(0.5, 0.5, 1.0),
    returns=numbers(0.75, 1.0, 2.0),
    rewards=numbers(0.0, 1.0, 0.0),
    end_values=numbers(0.0, 0.0, 2.0),
    trains=torch.tensor([True, True, True]),
    lambdas=(0.5, 0.5),
    gamma=1.0,
)


def test_right_estimates_fulfil_the_equation() -> None:
    assert estimate_errors(TOKENS) == (0.0, 0.0)


@pytest.mark.parametrize(
    ("changed", "of_advantages", "of_returns"),
    [
        (replace(TOKENS, returns=TOKENS.advantages), False, True),
        (replace(TOKENS, lambdas=(1.0, 0.5)), True, False),
        (replace(TOKENS, end_values=numbers(0, 0, 0)), True, True),
        (replace(TOKENS, rewards=numbers(1, 0, 0)), True, True),
        (replace(TOKENS, advantages=TOKENS.advantages * torch.nan), True, False),
    ],
)
def test_each_mistake_is_seen_where_it_is(
    changed: EstimatedTokens, of_advantages: bool, of_returns: bool
) -> None:
    errors = estimate_errors(changed)
    assert (errors[0] > 0.01, errors[1] > 0.01) == (of_advantages, of_returns)


def test_tokens_that_do_not_train_are_not_judged() -> None:
    wrong = replace(TOKENS, advantages=numbers(0.5, 0.5, 9.0), trains=torch.tensor([True, True, False]))
    assert estimate_errors(wrong) == (0.0, 0.0)


def test_gae_itself_is_within_the_rounding_of_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 40, (50,), generator=generator)
    total = int(lengths.sum())
    mask = torch.ones(total, dtype=torch.uint8)
    mask[lengths.cumsum(0) - lengths] = 0
    values, rewards = torch.randn(total, generator=generator), torch.randn(total, generator=generator)
    found = generalised_advantages(
        values, rewards, mask, lengths, torch.zeros(50), gamma=0.99, gae_lambda=0.95
    )
    positions = mask.nonzero().squeeze(1)
    sample = torch.repeat_interleave(torch.arange(50), lengths)[positions]
    tokens = EstimatedTokens(
        run=sample,
        values=values[positions].double(),
        advantages=found.advantages[positions].double(),
        returns=found.returns[positions].double(),
        rewards=rewards[positions].double(),
        end_values=torch.zeros(len(sample), dtype=torch.float64),
        trains=torch.ones(len(sample), dtype=torch.bool),
        lambdas=(0.95, 0.95),
        gamma=0.99,
    )
    assert max(estimate_errors(tokens)) < 2**-21


def test_a_critics_loss_and_slope_are_those_of_autograd() -> None:
    """Of five values two are clipped: the second is 0.3 away from 0.1, and would gain by it."""
    values = numbers(0.05, 0.4, -0.4, 0.3, 0.0).requires_grad_()
    old, returns = numbers(0.0, 0.1, 0.0, 0.0, 0.0), numbers(1.0, 1.0, -1.0, -1.0, 0.5)
    shares = numbers(0.2, 0.2, 0.2, 0.2, 0.0)
    terms = value_loss(values, old, returns, clip_range=0.2)
    total = (terms.per_token * shares).sum()
    total.backward()
    tokens = ValuedTokens(values=values.detach(), old_values=old, returns=returns, shares=shares)
    loss, slope, is_certain = value_terms(tokens, 0.2)
    assert is_certain.all()
    assert float(loss.sum()) == pytest.approx(total.item())
    assert slope.tolist() == pytest.approx(values.grad.tolist())
    assert slope[1] == slope[2] == 0.0


def test_a_value_at_the_bound_is_not_certain() -> None:
    tokens = ValuedTokens(
        values=numbers(0.2), old_values=numbers(0.0), returns=numbers(1.0), shares=numbers(1.0)
    )
    assert not bool(value_terms(tokens, 0.2)[2])
    assert bool(value_terms(tokens, None)[2])
