"""The memory of one training worker, by what holds it, from the sizes of the model and the layout.

Weights, gradients and optimizer state are exact but for padding. Activations are an estimate, which counts
what the layers of Llama and Qwen keep for the backward pass, as arXiv 2205.05198 does for GPT; FlashAttention
keeps no matrix of probabilities. What a checkpoint takes on the host is told too.
"""

from __future__ import annotations

from dataclasses import dataclass

from nemo_like.algorithms.logit_chunks import LOGIT_CHUNK_BYTES
from nemo_like.models.adapter_layers import num_adapter_parameters
from nemo_like.models.model_info import ModelInfo
from nemo_like.policy.layout import adapters_of, recomputes_layers, stage_size
from nemo_like.policy.options import (
    PolicyBackend,
    Precision,
    TrainedGroupConfig,
    WorkerGroupConfig,
)
from nemo_like.policy.parallelism import shards_optimizer

_FLOAT32 = 4
_MOMENTS = 2 * _FLOAT32  # Adam's, per trained parameter
_LOGIT_CHUNKS = {"forward": 2, "backward": 3}
# FSDP gathers a layer while the one before it computes.
_GATHERED_LAYERS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyMemory:
    """Bytes of one worker of a policy, a critic or a teacher, by part: on its GPU but for the last three."""

    weights: int
    gradients: int
    optimizer: int  # master weights and moments
    starting: int  # beside the weights, at most, until it is ready
    training_activations: int  # of the largest micro-batches, with logits, whole layers and whole gradients
    logprob_activations: int
    stored: int  # what it writes of a checkpoint without moments that are gathered
    gathered: int  # masters and moments that it collects from others for a checkpoint
    on_host: int  # weights, gradients and moments that stay on the host


def policy_memory(policy: WorkerGroupConfig, model: ModelInfo, rank: int) -> PolicyMemory:
    """Return the memory of the worker of this rank in the group that ``policy`` configures, be it the policy,
    a critic or a teacher, whose model is frozen."""
    held = (
        _held_by_fsdp(policy, model) if policy.backend is PolicyBackend.fsdp else _held(policy, model, rank)
    )
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _ModelState:
    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    starting: int = 0
    whole_layers: int = 0  # that exist while the model computes
    whole_gradients: int = 0  # until an update
    stored: int = 0
    gathered: int = 0
    on_host: int = 0


def _held(policy: WorkerGroupConfig, model: ModelInfo, rank: int) -> _ModelState:
    """Return what a rank of Megatron-core holds: experts are divided over EP, everything else over TP."""
    megatron, counts = policy.megatron_cfg, model.parameters
    tp, pp, ep = (
        megatron.tensor_model_parallel_size,
        megatron.pipeline_model_parallel_size,
        megatron.expert_model_parallel_size,
    )
    stage, num_layers = rank // stage_size(policy), counts.num_layers // pp
    others = num_layers * counts.layer_without_experts
    if stage == 0:
        others += counts.input_embeddings
    if stage == pp - 1:
        others += counts.output_layer + counts.final_norm
        if model.has_tied_embeddings and pp > 1:
            others += counts.input_embeddings  # the last stage has a copy
    others //= tp
    experts = num_layers * counts.experts // ep
    weights = (others + experts) * _weight_bytes(policy)
    if not isinstance(policy, TrainedGroupConfig):
        return _ModelState(weights=weights)
    trained_others, trained_experts, lora = others, experts, adapters_of(policy)
    if lora is not None:
        trained_others, trained_experts = num_adapter_parameters(model, lora) // (tp * pp), 0
    # What trains in float32, as adapters always do, is its own master.
    is_float32 = policy.precision is Precision.float32 or lora is not None
    per_parameter = _MOMENTS + (0 if is_float32 else _FLOAT32)
    copies = stage_size(policy) // tp if shards_optimizer(policy) else 1
    expert_copies = stage_size(policy) // ep if shards_optimizer(policy) else 1
    adapters = trained_others if lora is not None else 0
    gradients = (trained_others + trained_experts) * _FLOAT32
    updated = trained_others // copies + trained_experts // expert_copies
    # Weights of a sharded optimizer move into one buffer, while those that were loaded are still there.
    # Master weights are made beside the gradients, and moments when gradients may have left.
    is_moved = shards_optimizer(policy) and lora is None
    moved = (trained_others + trained_experts) * _weight_bytes(policy) * is_moved
    masters = updated * (per_parameter - _MOMENTS)
    stored, gathered = _in_checkpoint(policy, rank, trained_others, trained_experts)
    return _ModelState(
        weights=weights + adapters * _FLOAT32,
        gradients=gradients,
        optimizer=per_parameter * updated,
        starting=max(gradients + max(moved, masters), per_parameter * updated),
        stored=stored,
        gathered=gathered,
    )


def _in_checkpoint(policy: WorkerGroupConfig, rank: int, others: int, experts: int) -> tuple[int, int]:
    """Return what a rank of Megatron-core writes of a checkpoint, and what it gathers for it.

    The first rank of each data-parallel group writes, and gathers an optimizer that is sharded: for each
    trained parameter its master and two moments. The first ranks of experts and of everything else differ.
    """
    megatron, index = policy.megatron_cfg, rank % stage_size(policy)
    written = others * (index < megatron.tensor_model_parallel_size)
    written += experts * (index < megatron.expert_model_parallel_size)
    is_float32 = policy.precision is Precision.float32 or adapters_of(policy) is not None
    weights = written * (_FLOAT32 if is_float32 else _weight_bytes(policy))
    if shards_optimizer(policy):
        return weights, written * (_FLOAT32 + _MOMENTS)
    return weights + written * (_MOMENTS + (0 if is_float32 else _FLOAT32)), 0


def _held_by_fsdp(policy: WorkerGroupConfig, model: ModelInfo) -> _ModelState:
    """Return what a rank of FSDP holds: a part of what trains, in float32, a part of what is frozen, in the
    group's precision, and a few whole layers at a time."""
    tp = policy.fsdp_cfg.tensor_parallel_size
    ranks = tp * policy.data_parallel_size
    counts = model.parameters
    trained, frozen, lora = model.num_parameters, 0, adapters_of(policy)
    if not isinstance(policy, TrainedGroupConfig):
        trained, frozen = 0, model.num_parameters
    elif lora is not None:
        trained, frozen = num_adapter_parameters(model, lora), model.num_parameters
    whole_layers = (_GATHERED_LAYERS * counts.layer + counts.input_embeddings) * _weight_bytes(policy) // tp
    weights = (trained * _FLOAT32 + frozen * _weight_bytes(policy)) // ranks
    gradients, moments = trained * _FLOAT32 // ranks, trained * _MOMENTS // ranks
    stored = trained * (_FLOAT32 + _MOMENTS) // ranks
    reduces_once = isinstance(policy, TrainedGroupConfig) and policy.fsdp_cfg.reduce_gradients_once
    whole_gradients = trained * _FLOAT32 // tp * reduces_once
    if policy.fsdp_cfg.cpu_offload:
        on_host = weights + gradients + moments
        return _ModelState(
            whole_layers=whole_layers, whole_gradients=whole_gradients, stored=stored, on_host=on_host
        )
    return _ModelState(
        weights=weights,
        gradients=gradients,
        optimizer=moments,
        starting=moments,
        whole_layers=whole_layers,
        whole_gradients=whole_gradients,
        stored=stored,
    )


def _weight_bytes(policy: WorkerGroupConfig) -> int:
    return _FLOAT32 if policy.precision is Precision.float32 else 2


def _micro_batch_tokens(policy: WorkerGroupConfig) -> tuple[int, int]:
    """Return the most tokens of a micro-batch in training and in the log-prob phases, on one rank; 0 where
    nothing trains."""
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
    contexts = 1
    if policy.backend is PolicyBackend.megatron:
        contexts = policy.megatron_cfg.context_parallel_size
    return train_tokens // contexts, logprob_tokens // contexts


def _training_bytes(policy: WorkerGroupConfig, model: ModelInfo, num_tokens: int) -> int:
    """Return the bytes that micro-batches of so many tokens keep until their backward pass, and its own."""
    num_layers, in_flight = model.num_layers, 1
    tp = policy.fsdp_cfg.tensor_parallel_size
    if policy.backend is PolicyBackend.megatron:
        megatron = policy.megatron_cfg
        tp = megatron.tensor_model_parallel_size
        num_layers //= megatron.pipeline_model_parallel_size
        in_flight = megatron.pipeline_model_parallel_size  # forwards before the first backward, on stage 0
    layer = _layer_bytes(policy, model, num_tokens)
    if recomputes_layers(policy):
        inputs = num_tokens * model.hidden_size * _weight_bytes(policy) // _sequence_parts(policy)
        kept = num_layers * inputs * in_flight + layer
    else:
        kept = num_layers * layer * in_flight
    if model.has_value_head:
        return kept
    # The gradient of the output layer's weight is summed in float32.
    return (
        kept
        + _LOGIT_CHUNKS["backward"] * LOGIT_CHUNK_BYTES[policy.device]
        + (_FLOAT32 * model.vocab_size * model.hidden_size // tp)
    )


def _forward_bytes(policy: WorkerGroupConfig, model: ModelInfo, num_tokens: int) -> int:
    """Return the bytes of a forward pass alone: those of one layer, and logits where there are any."""
    num_chunks = 0 if model.has_value_head else _LOGIT_CHUNKS["forward"]
    return _layer_bytes(policy, model, num_tokens) + num_chunks * LOGIT_CHUNK_BYTES[policy.device]


def _layer_bytes(policy: WorkerGroupConfig, model: ModelInfo, num_tokens: int) -> int:
    tp, parts = _tensor_parallel_size(policy), _sequence_parts(policy)
    return layer_bytes(model, num_tokens, value_bytes=_weight_bytes(policy), tp=tp, sequence_parts=parts)


def layer_bytes(
    model: ModelInfo, num_tokens: int, *, value_bytes: int, tp: int, sequence_parts: int = 1
) -> int:
    """Return the bytes of one layer's activations on each of ``tp`` ranks; sequence parallelism divides the
    tokens outside of attention and FFN into ``sequence_parts``.

    With hidden size H, query and KV widths Q and K and an FFN of size F these are, per token, 4 H (inputs and
    outputs of the norms), 2 Q + 2 K (and Q + K again where these are normalised) and 4 F (both halves, the
    activation, the product). A mixture has k experts' F per token, and the tokens that they get and return,
    2 k H.
    """
    query, key_value = model.num_heads * model.head_size, 2 * model.num_kv_heads * model.head_size
    attention = (3 if model.has_qk_norm else 2) * query + (2 if model.has_qk_norm else 1) * key_value
    chosen = model.num_experts_per_token
    hidden = 4 * model.hidden_size / sequence_parts
    if chosen:
        # Expert parallelism moves tokens between ranks, but in the mean each gets as many as it has.
        ffn = chosen * (4 * model.intermediate_size + 2 * model.hidden_size) / sequence_parts
    else:
        ffn = 4 * model.intermediate_size / tp
    return int(num_tokens * value_bytes * (hidden + attention / tp + ffn))


def _tensor_parallel_size(policy: WorkerGroupConfig) -> int:
    if policy.backend is PolicyBackend.fsdp:
        return policy.fsdp_cfg.tensor_parallel_size
    return policy.megatron_cfg.tensor_model_parallel_size


def _sequence_parts(policy: WorkerGroupConfig) -> int:
    """Return over how many ranks sequence parallelism divides the tokens outside of attention and FFN."""
    if policy.backend is PolicyBackend.fsdp or not policy.megatron_cfg.sequence_parallel:
        return 1
    return policy.megatron_cfg.tensor_model_parallel_size
