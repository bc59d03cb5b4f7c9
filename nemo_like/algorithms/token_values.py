"""Values of tokens from hidden states: the head of a critic, a linear layer with one output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenValues:
    """What a critic says of the M scored tokens of a micro-batch, in the micro-batch's order.

    ``values`` [M] float32, in units of the reward, carry a gradient in training. A token's value is that of
    the state in which it was chosen: of all tokens before it, and not of itself.
    """

    values: Tensor

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The values."""
        return (self.values,)

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> TokenValues:
        """Return the values whose ``tensors`` these are."""
        return cls(tensors[0])


def linear_values(hidden: Tensor, weight: Tensor) -> TokenValues:
    """Compute the values of M tokens in float32 from the ``hidden`` states before them, [M, H], and the
    head's ``weight``, [1, H]."""
    # Not a linear layer without its last axis: FSDP warns of a module that returns a view.
    return TokenValues(hidden.float() @ weight[0].float())
