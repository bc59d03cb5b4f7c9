"""Low-rank adapters (peft) beside frozen weights, and their merging into these weights.

LoRA: arXiv 2106.09685.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from nemo_like.config.schema import LoraConfig

if TYPE_CHECKING:
    from peft import PeftConfig

_NAME = "default"  # peft's name of the one adapter that each layer has
_ALL_LINEAR = "all-linear"
_BASE = ".base_layer"
_WEIGHTS_FILE = "adapter_model.safetensors"
_PEFT_PREFIX = "base_model.model."


class Adapters:
    """The adapted layers of a model, by name; empty for a model that trains as a whole.

    ``config`` is peft's configuration, which names the adapted layers.
    """

    def __init__(self, layers: Mapping[str, Any], config: PeftConfig | None = None) -> None:
        self._layers, self._config = dict(layers), config

    def __bool__(self) -> bool:
        return bool(self._layers)

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """Make the model compute without its adapters within the block.

        This sets the adapters' scaling factors to 0: peft's own switch also freezes the adapters, which FSDP
        would remember.
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
        parameter without an adapter comes back as it is.

        ``full`` gathers a parameter by its name.
        """
        layer_name, _, leaf = name.rpartition(f"{_BASE}.")
        if leaf != "weight" or layer_name not in self._layers:
            return weight
        layer = self._layers[layer_name]
        down, up = (full(f"{layer_name}.{part}.{_NAME}.weight") for part in ("lora_A", "lora_B"))
        delta = layer.scaling[_NAME] * (up @ down)
        # Some layers store their weight [in, out].
        return weight.float() + (delta.T if layer.fan_in_fan_out else delta)

    def parameter_names(self) -> list[str]:
        """Return the names of the adapters' parameters, which ``save`` needs."""
        return [f"{layer}.{part}.{_NAME}.weight" for layer in self._layers for part in ("lora_A", "lora_B")]

    def save(self, path: Path, source: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write a directory from which ``peft.PeftModel.from_pretrained`` loads the adapters beside the model
        in ``source``. ``tensors`` are the full parameters of ``parameter_names``, by name."""
        assert self._config is not None
        self._config.base_model_name_or_path = str(source.absolute())
        self._config.save_pretrained(str(path))
        named = {_PEFT_PREFIX + name.replace(f".{_NAME}.", "."): value for name, value in tensors.items()}
        save_file(named, path / _WEIGHTS_FILE, metadata={"format": "pt"})


def add_adapters(model: PreTrainedModel, cfg: LoraConfig) -> Adapters:
    """Put adapters, still without values, beside the target layers and freeze all other parameters.

    Raises ValueError when a configured name fits no layer, or fits one that is no linear layer inside the
    model.
    """
    _check_targets(model, cfg)
    from peft import LoraConfig as PeftLora
    from peft import inject_adapter_in_model
    from peft.tuners.lora import LoraLayer

    targets = cfg.target_modules
    peft_config = PeftLora(
        task_type="CAUSAL_LM",
        r=cfg.rank,
        lora_alpha=cfg.alpha,
        lora_dropout=cfg.dropout,
        target_modules=_ALL_LINEAR if targets == [_ALL_LINEAR] else targets,
    )
    inject_adapter_in_model(peft_config, model, adapter_name=_NAME, low_cpu_mem_usage=True)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
    for name, layer in layers.items():
        if _NAME not in layer.lora_A or layer is model.get_output_embeddings():
            raise ValueError(
                f"policy.lora.target_modules names {name!r}, an embedding or the output layer; "
                "name linear layers inside the model"
            )
    return Adapters(layers, peft_config)


def _check_targets(model: PreTrainedModel, cfg: LoraConfig) -> None:
    """Raise ValueError when any configured name fits no layer; peft would accept that if another fits."""
    if cfg.target_modules == [_ALL_LINEAR]:
        return
    names = [name for name, _ in model.named_modules()]
    unknown = [
        target
        for target in cfg.target_modules
        if not any(name == target or name.endswith(f".{target}") for name in names)
    ]
    if unknown:
        linear = {name.rpartition(".")[2] for name, layer in model.named_modules() if _is_linear(layer)}
        raise ValueError(
            f"policy.lora.target_modules={cfg.target_modules}: no layer of the model is called "
            f"{', '.join(unknown)}; its linear layers are {', '.join(sorted(linear))}"
        )


def _is_linear(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear | Conv1D)


def checkpoint_name(name: str) -> str | None:
    """Return the name of a parameter in a model without adapters, None for an adapter's own parameter."""
    return None if ".lora_" in name else name.replace(f"{_BASE}.", ".")


def initial_values(parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the adapters' first values, from a fixed seed: A is random and B zero, so that the model's
    outputs do not change yet."""
    generator = torch.Generator().manual_seed(0)
    values = {}
    for name, parameter in parameters.items():
        if checkpoint_name(name) is None:
            values[name] = torch.zeros(parameter.shape)
            if ".lora_A." in name:
                nn.init.kaiming_uniform_(values[name], a=math.sqrt(5), generator=generator)
    return values
