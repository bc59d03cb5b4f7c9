"""Reads the weights with which a vLLM worker's model computes. The functions run in the worker's process.

On CPUs vLLM packs the weights of linear layers and deletes them. So a linear layer multiplies unit vectors:
each product is one column of its weight, to the bit, whatever the packing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from nemo_like.mismatch.points import PARTS
from nemo_like.mismatch.weight_words import weight_word

_COLUMNS_AT_ONCE = 512
_LINEAR = re.compile(r".*\.(?:qkv_proj|o_proj|gate_up_proj|down_proj|gate|router)")
_OF_GPT_OSS = {r"(layers\.\d+)\.attn\b": r"\1.self_attn", r"\bembedding$": "embed_tokens"}


def arrived_weights(worker: Any) -> dict[str, int]:
    """Return a digest of the bytes of each tensor of the latest transfer, by its Hugging Face name."""
    found: dict[str, int] = worker.weight_receiver.arrived()
    return found


def held_weights(worker: Any) -> dict[str, int]:
    """Return a digest of each weight of the model, by its Hugging Face name.

    Weights of a mixture's experts, quantized weights and those under adapters are left out, and all weights
    where the engine has several workers, each of which holds parts.
    """
    config = worker.vllm_config
    if config.parallel_config.world_size > 1 or config.model_config.quantization is not None:
        return {}
    with torch.no_grad():
        return {name: weight_word(tensor) for name, tensor in _weights(worker)}


def _weights(worker: Any) -> Iterator[tuple[str, Tensor]]:
    model, dtype = worker.get_model(), worker.vllm_config.model_config.dtype
    vocab_size = model.config.vocab_size
    for module_name, module in model.named_modules():
        name = _hf_name(module_name)
        if _LINEAR.fullmatch(name) and hasattr(module, "quant_method"):
            sizes = getattr(module, "output_sizes", None)
            yield from _parts(f"{name}.weight", multiplied(module, dtype, worker.device), sizes)
            if isinstance(bias := getattr(module, "bias", None), Tensor):
                yield from _parts(f"{name}.bias", bias, sizes)
        elif name.endswith("norm") and isinstance(getattr(module, "weight", None), Tensor):
            yield f"{name}.weight", module.weight
        elif name.endswith("embed_tokens"):
            yield f"{name}.weight", module.weight[:vocab_size]
        elif name == "lm_head":
            yield f"{name}.weight", multiplied(module, dtype, worker.device)[:vocab_size]
        elif isinstance(sinks := getattr(module, "sinks", None), nn.Parameter):
            yield f"{name}.sinks", sinks


def _hf_name(name: str) -> str:
    for own, usual in _OF_GPT_OSS.items():
        name = re.sub(own, usual, name)
    return name


def _parts(name: str, tensor: Tensor, sizes: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield a tensor, and of one that stacks several the rows of each: checkpoints have either."""
    prefix, leaf, kind = name.rsplit(".", 2)
    yield name, tensor
    if leaf not in PARTS:
        return
    for part, rows in zip(PARTS[leaf], tensor.split(list(sizes)), strict=True):
        yield f"{prefix}.{part}.{kind}", rows


def multiplied(module: Any, dtype: torch.dtype, device: Any) -> Tensor:
    """Return the weight [outputs, inputs] of a linear layer from its products with unit vectors."""
    num_inputs = getattr(module, "input_size", None) or module.embedding_dim
    columns = []
    for start in range(0, num_inputs, _COLUMNS_AT_ONCE):
        count = min(_COLUMNS_AT_ONCE, num_inputs - start)
        units = torch.zeros(count, num_inputs, dtype=dtype, device=device)
        units[torch.arange(count), torch.arange(start, start + count)] = 1
        columns.append(module.quant_method.apply(module, units, bias=None))
    return torch.cat(columns).T
