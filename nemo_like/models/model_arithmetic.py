"""The operations and the bytes of a decoder-only transformer, from its sizes alone.

FLOPs count a multiplication and an addition as two. Matrix products count, everything else does not: norms,
activations, softmax and rotary embeddings are a few per cent of the work and are bound by memory.
"""

from __future__ import annotations

from nemo_like.models.model_info import ModelInfo
from nemo_like.policy.options import Precision

# The gradients with regard to inputs and to weights are a matrix product each, for one in the forward pass.
BACKWARD_OVER_FORWARD = 2
# vLLM's attention on CPU reads the KV cache in blocks of a multiple of this many tokens.
CPU_BLOCK_TOKENS = 32


def value_bytes(precision: Precision) -> int:
    """Return the bytes of one number of this precision."""
    return 4 if precision is Precision.float32 else 2


def layer_flops_per_token(model: ModelInfo) -> int:
    """Return the FLOPs of one token's forward pass through the weights of all layers.

    A token meets its chosen experts only. The products of queries with keys are not in it, nor the output
    layer.
    """
    counts = model.parameters
    query, key_value = model.num_heads * model.head_size, 2 * model.num_kv_heads * model.head_size
    projections = model.hidden_size * (2 * query + key_value)
    experts = counts.num_experts_per_token * counts.expert
    return 2 * counts.num_layers * (projections + counts.dense_ffn + counts.router + experts)


def attention_flops_per_token(model: ModelInfo, context_length: float) -> float:
    """Return the FLOPs of one token's forward pass through attention over ``context_length`` tokens.

    Both products count, that of queries with keys and that of probabilities with values, in all layers. A
    causal sequence of L tokens has (L + 1) / 2 tokens of context in the mean.
    """
    return 4 * model.num_layers * model.num_heads * model.head_size * context_length


def output_flops_per_token(model: ModelInfo) -> int:
    """Return the FLOPs of the logits of one token, tied or not."""
    return 2 * model.hidden_size * model.vocab_size


def forward_flops_per_token(model: ModelInfo, context_length: float) -> float:
    """Return the FLOPs of one token's forward pass with its logits, over ``context_length`` tokens."""
    return (
        layer_flops_per_token(model)
        + attention_flops_per_token(model, context_length)
        + output_flops_per_token(model)
    )


def training_flops_per_token(model: ModelInfo, context_length: float) -> float:
    """Return the FLOPs of one token's forward and backward pass, without what is computed again."""
    return (1 + BACKWARD_OVER_FORWARD) * forward_flops_per_token(model, context_length)


def kv_bytes_per_token(model: ModelInfo, bytes_per_value: int = 2) -> int:
    """Return the bytes that the KV cache holds for one token, over all layers and KV heads."""
    return 2 * model.num_layers * model.num_kv_heads * model.head_size * bytes_per_value


def distinct_experts(model: ModelInfo, num_tokens: float) -> float:
    """Return how many experts of a layer ``num_tokens`` tokens reach in the mean; 0 without a mixture.

    Experts are taken to be chosen evenly and by each token independently, so that an expert is missed by all
    tokens with probability (1 - k / E) ^ num_tokens.
    """
    if model.num_experts is None:
        return 0.0
    missed = (1 - model.num_experts_per_token / model.num_experts) ** num_tokens
    return model.num_experts * (1 - missed)


def weights_read(model: ModelInfo, num_tokens: float) -> float:
    """Return how many parameters a forward pass of ``num_tokens`` tokens reads from memory.

    All parameters but the experts that no token reaches and the rows of an input embedding of its own.
    """
    counts = model.parameters
    looked_up = 0 if model.has_tied_embeddings else counts.input_embeddings
    idle = counts.num_experts - distinct_experts(model, num_tokens)
    return counts.total - looked_up - counts.num_layers * idle * counts.expert
