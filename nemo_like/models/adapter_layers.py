"""The layers that low-rank adapters can stand beside, by their names in Hugging Face checkpoints, and the
number of the adapters' parameters.

In a mixture the layers of feed-forward parts are those of the experts. transformers stacks these into two
parameters per layer, and peft puts one adapter per expert beside each of the two.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import sqrt

from nemo_like.models.model_info import ModelInfo
from nemo_like.policy.options import LoraConfig

PEFT_CONFIG = "adapter_config.json"  # of the adapters in a directory
ALL_LINEAR = "all-linear"  # in policy.lora.target_modules: every linear layer but the output layer
ATTENTION_LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj")
FEED_FORWARD_LAYERS = ("gate_proj", "up_proj", "down_proj")
ADAPTABLE_LAYERS = ATTENTION_LAYERS + FEED_FORWARD_LAYERS
# The parameters of transformers that have all experts of a layer, in its order: [experts, outputs, inputs].
GATE_AND_UP, DOWN = "gate_up_proj", "down_proj"
# The parameter of each layer of an expert; those of Mixtral have names of their own.
EXPERT_LAYERS = {
    "gate_proj": GATE_AND_UP,
    "up_proj": GATE_AND_UP,
    "down_proj": DOWN,
    "w1": GATE_AND_UP,
    "w3": GATE_AND_UP,
    "w2": DOWN,
}
GATE_AND_UP_PAIRS = (("gate_proj", "up_proj"), ("w1", "w3"))


def adapted_layers(lora: LoraConfig, num_experts: int | None = None) -> tuple[str, ...]:
    """Return which of ADAPTABLE_LAYERS get adapters, in the order of the model; in a mixture, with
    ``num_experts``, they are layers of the attention."""
    layers = ADAPTABLE_LAYERS if num_experts is None else ATTENTION_LAYERS
    return tuple(layer for layer in layers if layer in named_layers(lora))


def adapted_experts(lora: LoraConfig) -> tuple[str, ...]:
    """Return which parameters of a mixture's experts get adapters, in transformers' order; none of them with
    ``all-linear``, as in peft, since they are no linear layers."""
    if adapts_all_linear(lora):
        return ()
    named = {EXPERT_LAYERS.get(layer) for layer in named_layers(lora)}
    return tuple(parameter for parameter in (GATE_AND_UP, DOWN) if parameter in named)


def layers_of_experts(parameters: Iterable[str]) -> tuple[str, ...]:
    """Return the layers of an expert that these parameters have, by their usual names; a parameter that is
    not of experts has its own."""
    usual = {
        parameter: [layer for layer in FEED_FORWARD_LAYERS if EXPERT_LAYERS[layer] == parameter]
        for parameter in (GATE_AND_UP, DOWN)
    }
    return tuple(layer for parameter in parameters for layer in usual.get(parameter, [parameter]))


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
    """Return the number of scalars in the adapters of a model that has Llama's layers, and may have experts.

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
    }
    layers = named_layers(lora) if model.num_experts is None else adapted_layers(lora, model.num_experts)
    scalars = sum(inputs_and_outputs.get(layer, hidden + inner) for layer in layers)
    return model.num_layers * lora.rank * scalars + num_expert_adapter_parameters(model, lora)


def num_expert_adapter_parameters(model: ModelInfo, lora: LoraConfig) -> int:
    """Return the number of scalars in the adapters of all experts of a mixture; 0 without a mixture."""
    hidden, inner = model.hidden_size, model.intermediate_size
    inputs_and_outputs = {GATE_AND_UP: hidden + 2 * inner, DOWN: inner + hidden}
    scalars = sum(inputs_and_outputs[parameter] for parameter in adapted_experts(lora))
    return model.num_mixture_layers * (model.num_experts or 0) * lora.rank * scalars
