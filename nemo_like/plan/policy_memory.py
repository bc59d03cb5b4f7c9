"""Counts the memory of one training worker, by part, from the sizes of the model and the layout.

Weights, gradients and optimizer state are exact but for padding. Activations are an estimate: what the layers
of Llama and Qwen keep for the backward pass, counted as arXiv 2205.05198 does for GPT; FlashAttention keeps
no matrix of probabilities. The host memory of a checkpoint is counted too.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_like.algorithms.logit_chunks import LOGIT_CHUNK_BYTES
from nemo_like.models.model_info import ModelInfo
from nemo_like.policy.backends.backend_kind import (
    FLOAT32,
    axis_size,
    backend_kind_of,
    sequence_parts,
    weight_bytes_of,
)
from nemo_like.policy.groups.layout import num_chunks, recomputes_layers, stage_layers
from nemo_like.policy.options import TrainedGroupConfig, WorkerGroupConfig

_LOGIT_CHUNKS = {"forward": 2, "backward": 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyMemory:
    """The bytes of one worker of a policy, critic or teacher, by part; the last three are not on its GPU."""

    weights: int
    gradients: int
    optimizer: int  # master weights and moments
    starting: int  # the most that it takes beside the weights until it is ready
    training_activations: int  # of the largest micro-batches, with logits, whole layers and whole gradients
    logprob_activations: int
    stored: int  # the worker's part of a checkpoint, without gathered moments
    gathered: int  # master weights and moments that it collects from other workers for a checkpoint
    on_host: int  # weights, gradients and moments that stay on the host


def policy_memory(policy: WorkerGroupConfig, model: ModelInfo, rank: int) -> PolicyMemory:
    """Return the memory of the worker ``rank`` of the worker group that ``policy`` configures.

    The group may be the policy, a critic or a teacher, whose model is frozen.
    """
    held = backend_kind_of(policy).held_memory(policy, model, rank)
    train_tokens, logprob_tokens = _micro_batch_tokens(policy)
    return PolicyMemory(
        weights=held.weights,
        gradients=held.gradients,
        optimizer=held.optimizer,
        starting=held.starting,
        training_activations=_training_bytes(policy, model, train_tokens)
        + held.whole_layers
        + held.whole_gradients,
        logprob_activations=_forward_bytes(policy, model, logprob_tokens) + held.whole_layers,
        stored=held.stored,
        gathered=held.gathered,
        on_host=held.on_host,
    )


def _micro_batch_tokens(policy: WorkerGroupConfig) -> tuple[int, int]:
    """Return the most tokens per rank of a micro-batch, in training and in the log-prob phases.

    The former is 0 for a group that does not train.
    """
    packing, dynamic, train_tokens = policy.sequence_packing, policy.dynamic_batching, 0
    longest = policy.max_total_sequence_length
    if isinstance(policy, TrainedGroupConfig):
        train_tokens = policy.train_micro_batch_size * longest
        if packing.enabled or dynamic.enabled:
            budget = policy.sequence_packing if packing.enabled else policy.dynamic_batching
            train_tokens = budget.train_mb_tokens
    logprob_tokens = policy.logprob_batch_size * longest
    if packing.enabled or dynamic.enabled:
        logprob_tokens = (packing if packing.enabled else dynamic).logprob_mb_tokens
    contexts = axis_size(policy, "cp")
    return train_tokens // contexts, logprob_tokens // contexts


def _training_bytes(policy: WorkerGroupConfig, model: ModelInfo, num_tokens: int) -> int:
    """Return the bytes of a training pass on micro-batches of ``num_tokens`` tokens, forward and backward."""
    num_stages, chunks = axis_size(policy, "pp"), num_chunks(policy)
    # Forwards before the first backward, on stage 0, which are of chunks in an interleaved pipeline.
    in_flight = num_stages if chunks == 1 else 2 * (num_stages - 1) + (chunks - 1) * num_stages + 1
    num_layers, tp = stage_layers(policy, model.num_layers)[0] // chunks, axis_size(policy, "tp")
    layer = _layer_bytes(policy, model, num_tokens)
    if recomputes_layers(policy):
        inputs = num_tokens * model.hidden_size * weight_bytes_of(policy) // sequence_parts(policy)
        kept = num_layers * inputs * in_flight + layer
    else:
        kept = num_layers * layer * in_flight
    if model.has_value_head:
        return kept
    # The gradient of the output layer's weight is summed in float32.
    return (
        kept
        + _LOGIT_CHUNKS["backward"] * LOGIT_CHUNK_BYTES[policy.device]
        + (FLOAT32 * model.vocab_size * model.hidden_size // tp)
    )


def _forward_bytes(policy: WorkerGroupConfig, model: ModelInfo, num_tokens: int) -> int:
    """Return the bytes of a forward pass alone: one layer, and logits unless there is a value head."""
    num_chunks = 0 if model.has_value_head else _LOGIT_CHUNKS["forward"]
    return _layer_bytes(policy, model, num_tokens) + num_chunks * LOGIT_CHUNK_BYTES[policy.device]


def _layer_bytes(policy: WorkerGroupConfig, model: ModelInfo, num_tokens: int) -> int:
    tp, parts = axis_size(policy, "tp"), sequence_parts(policy)
    return layer_bytes(model, num_tokens, value_bytes=weight_bytes_of(policy), tp=tp, sequence_parts=parts)


def layer_bytes(
    model: ModelInfo, num_tokens: int, *, value_bytes: int, tp: int, sequence_parts: int = 1
) -> int:
    """Return the bytes of one layer's activations on each of ``tp`` ranks.

    Sequence parallelism divides the tokens outside of attention and FFN into ``sequence_parts``. With hidden
    size H, query and KV widths Q and K and an FFN of size F the values per token are 2 H for each norm (4 H
    in most models), 2 Q + 2 K (another Q + K where queries and keys are normalised) and 4 F (both halves, the
    activation, the product). Latent attention has as many as with normalised ones, and its latents before and
    after their norms. In a mixture, k experts of size F count per token, and 2 k H for the tokens that
    experts get and return, in every layer; shared experts are an FFN of their size.
    """
    query, key_value = model.num_heads * model.head_size, model.key_value_width
    has_copies = model.has_qk_norm or model.latent is not None
    attention = (3 if has_copies else 2) * query + (2 if has_copies else 1) * key_value
    chosen = model.num_experts_per_token
    hidden = 2 * model.family.norms_per_layer * model.hidden_size / sequence_parts
    if model.latent is not None:
        hidden += 2 * model.latent.norms / sequence_parts
    if chosen:
        # Expert parallelism moves tokens between ranks, but on average each rank gets as many as it sends.
        ffn = chosen * (4 * model.intermediate_size + 2 * model.hidden_size) / sequence_parts
        ffn += 4 * model.shared_ffn_size / tp
    else:
        ffn = 4 * model.intermediate_size / tp
    return int(num_tokens * value_bytes * (hidden + attention / tp + ffn))
