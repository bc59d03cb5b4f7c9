"""Counts the operations and bytes of a decoder-only transformer from its sizes.

A multiplication and an addition are two FLOPs. Only matrix products count: norms, activations, softmax and
rotary embeddings are a few per cent of the work, and memory bounds them.
"""

from __future__ import annotations

from nemo_like.models.model_info import ModelInfo
from nemo_like.policy.options import Precision

# For one matrix product forward there are two backward, for the gradients of inputs and of weights.
BACKWARD_OVER_FORWARD = 2
# vLLM's attention on CPU reads the KV cache in blocks of a multiple of this many tokens.
CPU_BLOCK_TOKENS = 32


def value_bytes(precision: Precision) -> int:
    """Return the bytes of one number of this precision."""
    return 4 if precision is Precision.float32 else 2


def layer_flops_per_token(model: ModelInfo) -> int:
    """Return the FLOPs of one token's forward pass through the weights of all layers.

    Of a mixture's experts only those chosen for the token count. Attention's products of queries with keys
    and of probabilities with values are not included, nor is the output layer.
    """
    counts = model.parameters
    experts = counts.shared_experts + counts.num_experts_per_token * counts.expert
    router = counts.num_experts * model.hidden_size
    ffn = counts.num_dense_layers * counts.dense_ffn + counts.num_mixture_layers * (router + experts)
    return 2 * (counts.num_layers * model.projections + ffn)


def attention_flops_per_token(model: ModelInfo, context_length: float) -> float:
    """Return the FLOPs of one token's attention over ``context_length`` tokens, in all layers.

    Counts the products of queries with keys and of probabilities with values. In a causal sequence of L
    tokens the mean context is (L + 1) / 2 tokens. A window is taken for the longest of all contexts of the
    layers that have it.
    """
    num_full = len(model.full_layers)
    in_window = min(context_length, model.window or context_length)
    of_all_layers = num_full * context_length + (model.num_layers - num_full) * in_window
    return 2 * model.num_heads * (model.head_size + model.value_size) * of_all_layers


def output_flops_per_token(model: ModelInfo) -> int:
    """Return the FLOPs of the logits of one token; tied embeddings do not change them."""
    return 2 * model.hidden_size * model.vocab_size


def forward_flops_per_token(model: ModelInfo, context_length: float) -> float:
    """Return the FLOPs of one token's forward pass with its logits, over ``context_length`` tokens."""
    return (
        layer_flops_per_token(model)
        + attention_flops_per_token(model, context_length)
        + output_flops_per_token(model)
    )


def training_flops_per_token(model: ModelInfo, context_length: float) -> float:
    """Return the FLOPs of one token's forward and backward pass, without recomputation of activations."""
    return (1 + BACKWARD_OVER_FORWARD) * forward_flops_per_token(model, context_length)


def kv_bytes_per_token(model: ModelInfo, bytes_per_value: int = 2) -> int:
    """Return the bytes that the KV cache holds for one token, over all layers and KV heads."""
    return model.num_layers * model.cached_width * bytes_per_value


def distinct_experts(model: ModelInfo, num_tokens: float) -> float:
    """Return the mean number of experts of a layer that ``num_tokens`` tokens reach; 0 without a mixture.

    Assumes that each token chooses evenly and independently, so that all tokens miss an expert with
    probability (1 - k / E) ^ num_tokens.
    """
    if model.num_experts is None:
        return 0.0
    missed = (1 - model.num_experts_per_token / model.num_experts) ** num_tokens
    return model.num_experts * (1 - missed)


def weights_read(model: ModelInfo, num_tokens: float) -> float:
    """Return how many parameters a forward pass of ``num_tokens`` tokens reads from memory.

    Counts all parameters except the experts that no token reaches and an input embedding that is not tied.
    """
    counts = model.parameters
    looked_up = 0 if model.has_tied_embeddings else counts.input_embeddings
    idle = counts.num_experts - distinct_experts(model, num_tokens)
    return counts.total - looked_up - counts.num_mixture_layers * idle * counts.expert
