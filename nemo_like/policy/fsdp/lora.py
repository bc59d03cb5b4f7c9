"""Low-rank adapters (peft) beside frozen weights, and their merging into these weights.

LoRA: arXiv 2106.09685.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from nemo_like.models.adapter_layers import ALL_LINEAR, adapts_all_linear
from nemo_like.policy.backends.adapters import LORA_A, LORA_B, initial_value, peft_config, peft_name
from nemo_like.policy.options import LoraConfig

if TYPE_CHECKING:
    from peft import PeftConfig

_NAME = "default"  # peft's name of each layer's only adapter
_BASE = ".base_layer"
ADAPTER_DROPOUT = ".lora_dropout."  # in the names of peft's modules that drop parts of an adapter's input


class Adapters:
    """The adapted layers of a model, by name; empty for a model that trains as a whole.

    ``config`` is peft's configuration, which names the adapted layers; None where there are no adapters.
    """

    def __init__(self, layers: Mapping[str, Any], config: PeftConfig | None = None) -> None:
        self._layers, self.config = dict(layers), config

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
        parameter without an adapter comes back unchanged.

        ``full`` gathers a parameter by its name.
        """
        layer_name, _, leaf = name.rpartition(f"{_BASE}.")
        if leaf != "weight" or layer_name not in self._layers:
            return weight
        layer = self._layers[layer_name]
        down, up = (full(f"{layer_name}.{part}.{_NAME}.weight") for part in (LORA_A, LORA_B))
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
    from peft.tuners.lora import LoraLayer

    config = peft_config(cfg, ALL_LINEAR if adapts_all_linear(cfg) else cfg.target_modules)
    inject_adapter_in_model(config, model, adapter_name=_NAME, low_cpu_mem_usage=True)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    for name, layer in layers.items():
        if _NAME not in layer.lora_A or layer is model.get_output_embeddings():
            raise ValueError(
                f"{group}.lora.target_modules names {name!r}, an embedding or the output layer; "
                "name linear layers inside the model"
            )
    return Adapters(layers, config)


def _check_targets(model: PreTrainedModel, group: str, cfg: LoraConfig) -> None:
    """Raise ValueError when a configured name fits no layer; peft would accept it if another name fits."""
    targets = [] if adapts_all_linear(cfg) else cfg.target_modules
    names = [name for name, _ in model.named_modules()]
    for leaf, layers in {"target_modules": targets, "exclude_modules": cfg.exclude_modules}.items():
        unknown = [
            layer
            for layer in layers
            if not any(name == layer or name.endswith(f".{layer}") for name in names)
        ]
        if unknown:
            linear = {
                name.rpartition(".")[2]
                for name, layer in model.named_modules()
                if isinstance(layer, nn.Linear | Conv1D)
            }
            raise ValueError(
                f"{group}.lora.{leaf}={layers}: no layer of the model is called "
                f"{', '.join(unknown)}; its linear layers are {', '.join(sorted(linear))}"
            )


def checkpoint_name(name: str) -> str | None:
    """Return a parameter's name in a model without adapters; None for an adapter's own parameter."""
    return None if ".lora_" in name else name.replace(f"{_BASE}.", ".")


def initial_values(parameters: Mapping[str, nn.Parameter], begun: str | None) -> dict[str, Tensor]:
    """Return the adapters' first values, by parameter name; ``begun`` is a directory with saved adapters."""
    values = {}
    for name, parameter in parameters.items():
        if checkpoint_name(name) is None:
            layer, part = name.removesuffix(f".{_NAME}.weight").rsplit(".", 1)
            values[name] = initial_value(peft_name(layer, part), parameter.shape, begun)
    return values
