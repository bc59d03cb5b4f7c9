"""Checks a critic's advantages and returns, and computes its loss a second time, in float64.

    A_i - gamma lambda A_{i+1} = r_i + gamma V_{i+1} - V_i          GAE (arXiv 1506.02438), token by token
    (R_i - V_i), in the place of A_i                                the same, with the critic's lambda
    loss = (V - R)^2 / 2, or the larger of it and (V_clipped - R)^2 / 2, by a token's share

The equation is checked at every token instead of being solved, so it shares nothing with the recursion that
``algorithms`` runs from the last token to the first.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# A value this close to a bound of the clipping, relative to its size, is not compared.
_NEAR = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatedTokens:
    """The M response tokens of a batch, in order, with a critic's columns; all are [M], float64 unless said
    otherwise."""

    run: Tensor  # int64, of tokens; without branches, one of each sample
    values: Tensor
    advantages: Tensor
    returns: Tensor
    rewards: Tensor  # of each token itself
    end_values: Tensor  # of each token's run: the value behind its last token
    trains: Tensor  # bool
    lambdas: tuple[float | Tensor, float]  # of the policy's advantages, and of the critic's returns
    gamma: float


def estimate_errors(tokens: EstimatedTokens) -> tuple[float, float]:
    """Return how far the advantages, and the returns, are from GAE's equation, relative to its terms."""
    is_last = torch.ones_like(tokens.trains)
    is_last[:-1] = tokens.run[1:] != tokens.run[:-1]
    next_values = torch.where(is_last, tokens.end_values, tokens.values.roll(-1))
    due = tokens.rewards + tokens.gamma * next_values - tokens.values
    sizes = tokens.rewards.abs() + tokens.gamma * next_values.abs() + tokens.values.abs()
    of_policy, of_critic = tokens.lambdas
    return (
        _error(tokens, tokens.advantages, of_policy, due, sizes, is_last),
        _error(tokens, tokens.returns - tokens.values, of_critic, due, sizes + tokens.returns.abs(), is_last),
    )


def _error(
    tokens: EstimatedTokens,
    advantages: Tensor,
    gae_lambda: float | Tensor,
    due: Tensor,
    sizes: Tensor,
    is_last: Tensor,
) -> float:
    following = tokens.gamma * gae_lambda * torch.where(is_last, 0.0, advantages.roll(-1))
    error = (advantages - following - due).abs()
    relative = error / (sizes + advantages.abs() + following.abs()).clamp(min=1e-30)
    return greatest(relative[tokens.trains])


@dataclass(frozen=True, slots=True, kw_only=True)
class ValuedTokens:
    """The M tokens on which a critic trained, over all micro-batches of a phase; all are [M] float64."""

    values: Tensor
    old_values: Tensor
    returns: Tensor
    shares: Tensor  # of the loss; 0 where a token does not train


def value_terms(tokens: ValuedTokens, clip_range: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return each token's loss, its derivative by the value, and whether that is clear of the clipping's
    bounds, [M]; all are by the token's share."""
    error = tokens.values - tokens.returns
    value, slope, is_certain = error.square() / 2, error, torch.ones_like(error, dtype=torch.bool)
    if clip_range is not None:
        moved = tokens.values - tokens.old_values
        held = tokens.old_values + moved.sign() * clip_range - tokens.returns
        is_outside = moved.abs() > clip_range
        is_held = is_outside & (held.abs() > error.abs())
        value, slope = torch.where(is_held, held.square() / 2, value), torch.where(is_held, 0.0, error)
        size = tokens.values.abs() + tokens.old_values.abs() + tokens.returns.abs()
        is_certain = ((moved.abs() - clip_range).abs() > _NEAR * size) & (
            ~is_outside | ((held.abs() - error.abs()).abs() > _NEAR * size)
        )
    return value * tokens.shares, slope * tokens.shares, is_certain


def greatest(values: Tensor) -> float:
    """Return the greatest value, 0 of none; infinity where one is NaN."""
    return float(values.nan_to_num(nan=torch.inf, posinf=torch.inf).max()) if values.numel() else 0.0
