"""How large the tensors are that PyTorch makes within a block."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LargestTensor(TorchDispatchMode):
    """Notes the most elements that a tensor of the block has."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        self.numel = max([self.numel, *sizes])
        return result


def largest(query: Tensor, key: Tensor, value: Tensor, attend: Any) -> int:
    """Return the most elements of a tensor in a forward and backward pass of an attention."""
    with LargestTensor() as seen:
        attend(query, key, value).sum().backward()
    return seen.numel
