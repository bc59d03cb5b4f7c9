"""``Substitution``: makes a trainer compute every module on the engine's own values.

At each point the trainer's values are kept, and the engine's are put in their place. So a module's values
differ from the engine's only by what this one module does otherwise: nothing adds up from layer to layer, and
two modules that are wrong both show.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from nemo_like.mismatch.points import LOGPROBS, point


@dataclass(frozen=True, slots=True)
class TensorPart:
    """Which values of a point one worker has: some of those that are divided, some rows of the others."""

    rank: int
    size: int
    divides_rows: bool  # by sequence parallelism


_WHOLE = TensorPart(0, 1, divides_rows=False)


@dataclass(slots=True)
class Substitution:
    """The engine's values, [T, width] float32 by point, and the trainer's own as they come.

    The trainer's tensors may have further rows, of padding, and any leading dims; T rows come first.
    """

    given: Mapping[str, np.ndarray]
    part: TensorPart
    num_groups: int  # of this worker's queries, which share a key and a value
    own: dict[str, np.ndarray] = field(default_factory=dict)

    def __call__(self, name: str, tensor: Tensor, *, replaces: bool = True) -> Tensor:
        """Keep the values at a point, and return the engine's in their shape; the same values again where
        the engine has none of this width, or unless ``replaces``."""
        if name not in self.given:
            return tensor
        if isinstance(tensor, DTensor):
            return self._replaced_in_parts(name, tensor, replaces)
        values = self._part_of(name)
        if tensor.numel() % values.shape[1]:  # the two mean different things by the name
            return tensor
        rows = tensor.reshape(-1, values.shape[1])
        first = self.part.rank * len(rows) if self._has_some_rows(name) else 0
        values = values[first : first + len(rows)]
        self.own[name] = rows[: len(values)].detach().to("cpu", torch.float32, copy=True).numpy()
        if not replaces:
            return tensor
        replaced = rows.detach().clone()
        replaced[: len(values)] = torch.from_numpy(values).to(replaced)
        return replaced.reshape(tensor.shape)

    def _replaced_in_parts(self, name: str, tensor: DTensor, replaces: bool) -> Tensor:
        """Do the same with a tensor that knows how it is spread over the ranks."""
        whole = replace(self, part=_WHOLE, own={})
        replaced = whole(name, tensor.full_tensor(), replaces=replaces)
        values, is_divided = whole.own[name], point(name).kind.is_divided
        self.own[name] = np.split(values, self.part.size, axis=1)[self.part.rank] if is_divided else values
        return distribute_tensor(replaced, tensor.device_mesh, tensor.placements)

    def width(self, name: str) -> int | None:
        """Return how many values this worker has at a point for each token; None where the engine has
        none."""
        return self._part_of(name).shape[1] if name in self.given else None

    def _part_of(self, name: str) -> np.ndarray:
        values = self.given[name]
        if not point(name).kind.is_divided:
            return values
        width = values.shape[1] // self.part.size
        return np.ascontiguousarray(values[:, self.part.rank * width : (self.part.rank + 1) * width])

    def _has_some_rows(self, name: str) -> bool:
        return self.part.divides_rows and not point(name).kind.is_divided


def joined(parts: Mapping[int, Mapping[str, np.ndarray]], divides_rows: bool) -> dict[str, np.ndarray]:
    """Join the values of all tensor-parallel ranks of one pipeline stage, by rank."""
    first = parts[0]
    whole = {}
    for name, values in first.items():
        others = [parts[rank][name] for rank in sorted(parts)]
        if point(name).kind.is_divided:
            whole[name] = np.concatenate(others, axis=1)
        else:
            whole[name] = np.concatenate(others) if divides_rows and name != LOGPROBS else values
    return whole
