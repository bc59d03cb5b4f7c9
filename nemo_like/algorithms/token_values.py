"""The head of a critic: a linear layer that computes tokens' values from hidden states."""

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
