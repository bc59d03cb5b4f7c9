"""A critic: its head, a linear layer that computes tokens' values from hidden states, and its loss.

The loss is PPO's (arXiv 1707.06347), with the clipping of arXiv 2005.12729.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenValues:
    """A critic's values of the M scored tokens of a micro-batch, in the micro-batch's order.

    ``values`` [M] float32, in units of the reward, carry a gradient in training. A token's value belongs to
    the state in which the token was chosen: it depends on all tokens before the token, not on the token.
    """

    values: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """A tuple with the values, as ``TokenScores.tensors`` has several."""
        return (self.values,)

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> TokenValues:
        """Return the values that have these ``tensors``; the inverse of the property."""
        return cls(tensors[0])


def linear_values(hidden: Tensor, weight: Tensor) -> TokenValues:
    """Compute the values of M tokens, in float32. hidden: [M, H], the states before the tokens; weight:
    [1, H], the head's."""
    # A product with weight[0], since FSDP warns of a module that returns a view (a linear layer's [:, 0]).
    return TokenValues(hidden.float() @ weight[0].float())


@dataclass(frozen=True, slots=True)
class ValueLossTerms:
    """A critic's loss on M tokens: ``per_token`` [M], to differentiate, and ``is_clipped`` [M] float32, which
    is 1 where clipping removed the gradient."""

    per_token: Tensor
    is_clipped: Tensor


def value_loss(
    values: Tensor, old_values: Tensor, returns: Tensor, *, clip_range: float | None
) -> ValueLossTerms:
    """Compute half the squared error of each token's value, [M].

    With ``clip_range`` c it is the larger of (V - R)^2 / 2 and (clip(V, V_old - c, V_old + c) - R)^2 / 2:
    an update does not gain from moving a value further than c from ``old_values``, which it had when the
    advantages were computed. None does not clip. All tensors are [M], in units of the reward.
    """
    plain = (values - returns).square()
    if clip_range is None:
        return ValueLossTerms(plain / 2, values.new_zeros(values.shape))
    kept = old_values + (values - old_values).clamp(-clip_range, clip_range)
    clipped = (kept - returns).square()
    is_clipped = ((clipped > plain) & ((values - old_values).abs() > clip_range)).float()
    return ValueLossTerms(plain.maximum(clipped) / 2, is_clipped)
