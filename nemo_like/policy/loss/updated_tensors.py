"""``UpdatedTensor``: one tensor of a model as an optimizer updates it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdatedTensor:
    """One tensor, or this rank's part of it, as the optimizer of this rank holds and updates it.

    ``weight`` may be a copy in float32 of what the model computes with. ``group`` has the settings by torch's
    names, such as "lr", and ``state`` what the optimizer keeps from update to update, such as "exp_avg"; the
    state is empty before the first update.
    """

    name: str  # in the model
    weight: Tensor
    is_matrix: bool  # as ``is_matrix`` has it; others have no weight decay
    group: Mapping[str, Any]
    state: Mapping[str, Any]

    @property
    def num_updates(self) -> int:
        """How many updates the optimizer has made of the tensor, as it counts them itself."""
        return int(self.state.get("step", self.group.get("step", 0)))


def is_matrix(name: str, tensor: Tensor) -> bool:
    """Return whether a model's tensor of this name is a matrix, or several of them. Biases of all experts in
    one tensor are vectors."""
    return tensor.dim() > 1 and not name.endswith("bias")
