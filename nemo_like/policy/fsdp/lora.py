"""Low-rank adapters (peft) beside frozen weights, and their merging into these weights.

LoRA: arXiv 2106.09685.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from nemo_like.models.adapter_layers import ALL_LINEAR, EXPERT_LAYERS, adapted_experts, adapts_all_linear
from nemo_like.policy.backends.adapters import LORA_A, LORA_B, initial_value, peft_config, peft_name
from nemo_like.policy.groups.adapter_rules import adapted_expert_problems
from nemo_like.policy.options import LoraConfig

if TYPE_CHECKING:
    from peft import PeftConfig

_NAME = "default"  # peft's name of each layer's only adapter
_BASE = ".base_layer"
_ROUTERS = ("gate", "router")
ADAPTER_DROPOUT = ".lora_dropout."  # in the names of peft's modules that drop parts of an adapter's input


class Adapters:
    """The adapted layers of a model, by name; empty for a model that trains as a whole.

    ``config`` is peft's configuration, which names the adapted layers; None where there are no adapters.
    ``experts`` has the layers that adapt a parameter of all experts, with its name in a model without
    adapters.
    """

    def __init__(
        self,
        layers: Mapping[str, Any],
        config: PeftConfig | None = None,
        experts: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self._layers, self.config = dict(layers), config
        self._beside = {experts.get(layer, f"{layer}.weight"): layer for layer in layers}

    def __bool__(self) -> bool:
        return bool(self._layers)

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Make the model compute without its adapters within the block.

        This sets the adapters' scaling factors to 0, since peft's own switch also freezes the adapters, and
        FSDP would remember that.
        """
        scalings = {name: layer.scaling[_NAME] for name, layer in self._layers.items()}
        try:
            for layer in self._layers.values():
                layer.scaling[_NAME] = 0.0
            yield
        finally:
            for name, layer in self._layers.items():
                layer.scaling[_NAME] = scalings[name]

    def merged(self, name: str, weight: Tensor, full: Callable[[str], Tensor]) -> Tensor:
        """Return the full parameter ``weight`` with its adapter merged, W + scaling * B @ A in float32; a
        parameter without an adapter comes back unchanged. One of all experts has an adapter per expert.

        ``full`` gathers a parameter by its name.
        """
        layer_name = self._beside.get(checkpoint_name(name) or "")
        if layer_name is None:
            return weight
        layer = self._layers[layer_name]
        down, up = (full(f"{layer_name}.{part}.{_NAME}.weight") for part in (LORA_A, LORA_B))
        if weight.dim() == 3:
            down, up = down.unflatten(0, (len(weight), -1)), up.unflatten(1, (-1, len(weight)))
            # transformers' mark of experts that are stored [in, out].
            is_transposed = getattr(layer.get_base_layer(), "is_transposed", False)
            delta = layer.scaling[_NAME] * torch.einsum("ore,eri->eoi", up, down)
            return weight.float() + (delta.mT if is_transposed else delta)
        delta = layer.scaling[_NAME] * (up @ down)
        # Some layers store their weight [in, out].
        return weight.float() + (delta.T if layer.fan_in_fan_out else delta)

    def parameter_names(self) -> Iterator[tuple[str, str]]:
        """Yield (name here, name as peft saves it) for the adapters' parameters."""
        for layer in self._layers:
            for part in (LORA_A, LORA_B):
                yield f"{layer}.{part}.{_NAME}.weight", peft_name(layer, part)


def add_adapters(model: PreTrainedModel, group: str, cfg: LoraConfig) -> Adapters:
    """Put adapters, still without values, beside the target layers and freeze all other parameters.

    ``group`` is the worker group's name in messages. Raises ValueError when a configured name fits no layer,
    or fits a layer that is not a linear layer inside the model.
    """
    _check_targets(model, group, cfg)
    from peft import inject_adapter_in_model
    from peft.tuners.lora import LoraLayer, ParamWrapper

    config = _peft_config(model, group, cfg)
    inject_adapter_in_model(config, model, adapter_name=_NAME, low_cpu_mem_usage=True)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    experts = {
        name: f"{name.replace(_BASE, '')}.{layer.parameter_name}"
        for name, layer in layers.items()
        if isinstance(layer, ParamWrapper)
    }
    for name, layer in layers.items():
        if _NAME not in layer.lora_A or layer is model.get_output_embeddings():
            raise ValueError(
                f"{group}.lora.target_modules names {name!r}, an embedding or the output layer; "
                "name linear layers inside the model"
            )
    return Adapters(layers, config, experts)


def _peft_config(model: PreTrainedModel, group: str, cfg: LoraConfig) -> PeftConfig:
    """Return peft's configuration of the adapters.

    In a mixture it names the layers outside the experts one by one: from names of experts' layers, and from
    all-linear, peft makes adapters of another rank, beside routers too. Raises ValueError for adapters that
    experts cannot have.
    """
    if not _stacked_experts(model):
        return peft_config(cfg, ALL_LINEAR if adapts_all_linear(cfg) else cfg.target_modules)
    for problem in adapted_expert_problems(group, cfg):
        raise ValueError(str(problem))
    targets = sorted(_linear_layers(model)) if adapts_all_linear(cfg) else cfg.target_modules
    outside = [layer for layer in targets if layer not in (*EXPERT_LAYERS, *_ROUTERS)]
    excluded = [layer for layer in cfg.exclude_modules if layer not in EXPERT_LAYERS]
    return peft_config(replace(cfg, exclude_modules=excluded), outside, adapted_experts(cfg))


def _linear_layers(model: PreTrainedModel) -> set[str]:
    """Return the last parts of the names of the model's linear layers, but for the output layer."""
    output = model.get_output_embeddings()
    return {
        name.rpartition(".")[2]
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear | Conv1D) and layer is not output
    }


def _stacked_experts(model: PreTrainedModel) -> set[str]:
    """Return the names of the parameters that have all experts of a layer."""
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.dim() == 3 and name.rpartition(".")[2] in EXPERT_LAYERS.values()
    }


def _check_targets(model: PreTrainedModel, group: str, cfg: LoraConfig) -> None:
    """Raise ValueError when a configured name fits no layer; peft would accept it if another name fits."""
    targets = [] if adapts_all_linear(cfg) else cfg.target_modules
    names = [name for name, _ in model.named_modules()]
    experts = EXPERT_LAYERS if _stacked_experts(model) else ()
    for leaf, layers in {"target_modules": targets, "exclude_modules": cfg.exclude_modules}.items():
        unknown = [
            layer
            for layer in layers
            if layer not in experts and not any(name == layer or name.endswith(f".{layer}") for name in names)
        ]
        if unknown:
            raise ValueError(
                f"{group}.lora.{leaf}={layers}: no layer of the model is called "
                f"{', '.join(unknown)}; its linear layers are {', '.join(sorted(_linear_layers(model)))}"
            )


def checkpoint_name(name: str) -> str | None:
    """Return a parameter's name in a model without adapters; None for an adapter's own parameter."""
    return None if ".lora_" in name else name.replace(_BASE, "")


def initial_values(parameters: Mapping[str, nn.Parameter], begun: str | None) -> dict[str, Tensor]:
    """Return the adapters' first values, by parameter name; ``begun`` is a directory with saved adapters."""
    values = {}
    for name, parameter in parameters.items():
        if checkpoint_name(name) is None:
            layer, part = name.removesuffix(f".{_NAME}.weight").rsplit(".", 1)
            values[name] = initial_value(peft_name(layer, part), parameter.shape, begun)
    return values
