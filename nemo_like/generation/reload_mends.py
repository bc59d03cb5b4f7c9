"""Has vLLM's layerwise reload take all weights of models whose loading it does not foresee.

While it reloads, vLLM has parameters without memory, and collects what their loaders are called with. Where
no loader was called it puts a layer's own parameters back.

Private parts of vllm 0.32.0: gpt-oss copies stacks of experts, and sinks, into its parameters without a
loader. The engine would keep its old ones and say nothing. MiniMax-M2 has loaders without the name for which
the reload asks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

NamedTensors = list[tuple[str, Tensor]]
_COPIES_STACKS = "GptOssForCausalLM"


class DirectParameters:
    """The parameters of a model that vLLM copies into without a loader."""

    def __init__(self, model: torch.nn.Module) -> None:
        """Find them before a reload begins, and name the loaders of all others."""
        self._copies_stacks = type(model).__name__ == _COPIES_STACKS
        named = ((module, dict(module.named_parameters(recurse=False))) for module in model.modules())
        self._sinks = [(module, own["sinks"]) for module, own in named if "sinks" in own]
        for parameter in model.parameters():
            loader = getattr(parameter, "weight_loader", None)
            if isinstance(loader, partial):
                vars(loader).setdefault("__name__", "partial")

    def put_back(self) -> None:
        """Have the model's own sinks in place once the reload has begun, so that they are copied into."""
        for module, sinks in self._sinks:
            module.sinks = sinks

    def single(self, tensors: NamedTensors) -> NamedTensors:
        """Return the tensors with the experts of a stack one by one, which vLLM loads with a loader."""
        return [*self._single(tensors)] if self._copies_stacks else tensors

    def _single(self, tensors: NamedTensors) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            layer, _, matrix = name.rpartition(".")
            if layer.endswith(".experts"):
                yield from ((f"{layer}.{index}.{matrix}", one) for index, one in enumerate(tensor))
            else:
                yield name, tensor
