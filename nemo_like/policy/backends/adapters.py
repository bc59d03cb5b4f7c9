"""What both backends do alike with low-rank adapters: first values, and names and files in peft's format.

LoRA: arXiv 2106.09685.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from nemo_like.models.adapter_layers import PEFT_CONFIG
from nemo_like.observability.disk import give_usual_mode
from nemo_like.policy.options import LoraConfig

if TYPE_CHECKING:
    from peft import PeftConfig

# The part of an export that holds the adapters alone, unmerged.
ADAPTER_DIRECTORY = "adapter"
# An adapter adds scaling * B @ A to a layer's weight.
LORA_A, LORA_B = "lora_A", "lora_B"
ADAPTER_DTYPE = torch.float32

_WEIGHTS_FILE = "adapter_model.safetensors"


def peft_name(layer: str, part: str) -> str:
    """Return the name under which peft saves ``part``, LORA_A or LORA_B, of the adapter beside ``layer``."""
    return f"base_model.model.{layer}.{part}.weight"


def expert_layer(layer: str, parameter: str, adapted: Sequence[str]) -> str:
    """Return the name of the layer of peft that adapts the experts' ``parameter`` in a decoder layer, where
    ``adapted`` are all of these: peft wraps the first of two twice."""
    experts = f"{layer}.mlp.experts"
    return f"{experts}.base_layer" if parameter != adapted[-1] else experts


def initial_value(name: str, shape: Sequence[int], begun: str | None = None) -> Tensor:
    """Return the first value of the adapter's tensor that peft calls ``name``, ``shape`` float32 on the CPU.

    It is that of the adapters in the directory ``begun``, where they are given. Raises ValueError when these
    have no tensor of that name and shape.

    Else A [rank, inputs] is random, B [outputs, rank] is zero, so that the model's outputs do not change yet.
    The name is the seed, so the values are the same on every rank, in every layout and with either backend.
    """
    if begun is not None:
        return _saved_value(Path(begun), name, shape)
    value = torch.zeros(*shape, dtype=ADAPTER_DTYPE)
    if f".{LORA_A}." in name:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        nn.init.kaiming_uniform_(value, a=math.sqrt(5), generator=generator)
    return value


def _saved_value(directory: Path, name: str, shape: Sequence[int]) -> Tensor:
    with safe_open(directory / _WEIGHTS_FILE, "pt") as file:
        found: Tensor | None = file.get_tensor(name) if name in file.keys() else None  # noqa: SIM118
    if found is None or tuple(found.shape) != tuple(shape):
        has = "nothing" if found is None else f"a tensor of shape {tuple(found.shape)}"
        raise ValueError(
            f"policy.lora.adapter_path={directory} has {has} for {name}, and the model needs one of shape "
            f"{tuple(shape)}"
        )
    return found.to(ADAPTER_DTYPE)


def peft_config(lora: LoraConfig, target_modules: str | list[str], experts: Sequence[str] = ()) -> PeftConfig:
    """Return peft's configuration object of adapters beside ``target_modules``, and beside these parameters
    of a mixture's experts."""
    from peft import LoraConfig as PeftLora

    return PeftLora(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=target_modules,
        target_parameters=[f"experts.{parameter}" for parameter in experts] or None,
        exclude_modules=lora.exclude_modules or None,
        use_rslora=lora.use_rslora,
    )


def adapter_config(config: PeftConfig, source: Path) -> dict[str, Any]:
    """Return the contents of peft's adapter_config.json, as plain JSON values, for adapters of the model in
    ``source``."""
    config.base_model_name_or_path = str(source.absolute())
    plain: dict[str, Any] = json.loads(json.dumps(config.to_dict(), default=sorted))
    return plain


def write_adapters(path: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write a directory from which ``peft.PeftModel.from_pretrained`` loads the adapters beside their model:
    ``config`` as ``adapter_config`` returns it, and full tensors by ``peft_name``."""
    path.mkdir(parents=True, exist_ok=True)
    (path / PEFT_CONFIG).write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    save_file(dict(tensors), path / _WEIGHTS_FILE, metadata={"format": "pt"})
    give_usual_mode(path / _WEIGHTS_FILE)
