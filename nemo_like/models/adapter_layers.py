"""The linear layers that low-rank adapters can stand beside, by their names in Hugging Face checkpoints, and
the number of the adapters' parameters."""

from __future__ import annotations

from math import sqrt

from nemo_like.models.model_info import ModelInfo
from nemo_like.policy.options import LoraConfig

PEFT_CONFIG = "adapter_config.json"  # of the adapters in a directory
ALL_LINEAR = "all-linear"  # in policy.lora.target_modules: every linear layer but the output layer
ATTENTION_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD_LAYERS = ("gate_proj", "up_proj", "down_proj")
ADAPTABLE_LAYERS = ATTENTION_LAYERS + FEED_FORWARD_LAYERS


def adapted_layers(lora: LoraConfig) -> tuple[str, ...]:
    """Return which of ADAPTABLE_LAYERS get adapters, in the order of the model."""
    return tuple(layer for layer in ADAPTABLE_LAYERS if layer in named_layers(lora))


def named_layers(lora: LoraConfig) -> tuple[str, ...]:
    """Return the layers that get adapters, by their names: those of Llama where all linear ones do."""
    named = ADAPTABLE_LAYERS if adapts_all_linear(lora) else lora.target_modules
    return tuple(layer for layer in named if layer not in lora.exclude_modules)


def adapter_scale(lora: LoraConfig) -> float:
    """Return the factor of B @ A: alpha / rank, or alpha / sqrt(rank) when it is rank-stabilised."""
    return lora.alpha / (sqrt(lora.rank) if lora.use_rslora else lora.rank)


def adapts_all_linear(lora: LoraConfig) -> bool:
    """Return whether every linear layer but the output layer gets an adapter."""
    return lora.target_modules == [ALL_LINEAR]


def num_adapter_parameters(model: ModelInfo, lora: LoraConfig) -> int:
    """Return the number of scalars in the adapters of a model that has Llama's layers.

    For other models it is an estimate: each named layer that Llama lacks counts like a feed-forward layer. An
    adapter is A [rank, inputs] and B [outputs, rank].
    """
    heads, groups = model.num_heads * model.head_size, model.num_kv_heads * model.head_size
    hidden, inner = model.hidden_size, model.intermediate_size
    inputs_and_outputs = {
        "q_proj": hidden + heads,
        "k_proj": hidden + groups,
        "v_proj": hidden + groups,
        "o_proj": model.num_heads * model.value_size + hidden,
        "gate_proj": hidden + inner,
        "up_proj": hidden + inner,
        "down_proj": inner + hidden,
    }
    layers = named_layers(lora)
    if adapts_all_linear(lora) and model.num_experts is not None:
        # A mixture's experts are no linear layers of their own.
        layers = tuple(layer for layer in layers if layer in ATTENTION_LAYERS)
    scalars = sum(inputs_and_outputs.get(layer, hidden + inner) for layer in layers)
    return model.num_layers * lora.rank * scalars
