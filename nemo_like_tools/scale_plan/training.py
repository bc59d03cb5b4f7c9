"""Estimates log-probs and updates: compute, exchanges between GPUs, gradients and optimizer."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nemo_like.models.model_arithmetic import (
    BACKWARD_OVER_FORWARD,
    attention_flops_per_token,
    layer_flops_per_token,
    output_flops_per_token,
    training_flops_per_token,
)
from nemo_like_tools.scale_plan.hardware import Assumptions, GpuDataSheet
from nemo_like_tools.scale_plan.recipe_workload import TrainLayout, Workload

_BF16 = 2
_GRADIENT_BYTES = 4  # reduced in float32
# AdamW reads gradient, master weight and two moments in float32, writes the latter three and the bf16 weight.
_OPTIMIZER_BYTES = 4 + 3 * 4 + 3 * 4 + 2


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCost:
    """The times of the trainer's two stages, and the bytes that one of its GPUs sends."""

    logprobs_s: float
    training_s: float
    exposed_gradients_s: float  # exchange between replicas that training does not hide
    nvlink_bytes: float
    network_bytes: float
    model_flops_share: float  # of peak FLOP/s, in training, without recomputation


@dataclass(frozen=True, slots=True, kw_only=True)
class _Exchange:
    """The bytes that a GPU sends during the forward pass of one token of its replica."""

    nvlink_bytes: float
    network_bytes: float

    def seconds(self, gpu: GpuDataSheet, assumptions: Assumptions) -> float:
        return self.nvlink_bytes / (
            gpu.nvlink_bytes_per_s * assumptions.nvlink_share
        ) + self.network_bytes / (gpu.network_bytes_per_s * assumptions.network_share)


def training_cost(workload: Workload, gpu: GpuDataSheet, assumptions: Assumptions) -> TrainingCost:
    """Return the seconds of both stages on the busiest replica, and the bytes that its GPUs send."""
    train, model = workload.train, workload.model
    compute_s = forward_s(workload, gpu, assumptions) / train.replica
    exchange = _exchange(workload, gpu)
    exchange_s = exchange.seconds(gpu, assumptions)
    scored = busiest_tokens(workload, updates=1)
    trained = busiest_tokens(workload, updates=workload.updates)
    logprobs_s = workload.logprob_phases * scored * (compute_s + exchange_s)
    logprobs_s *= bubble(train, scored, train.logprob_mb_tokens)
    forwards = 2 if train.recomputes else 1
    token_s = (forwards + BACKWARD_OVER_FORWARD) * compute_s + (forwards + 1) * exchange_s
    update_s = trained * token_s * bubble(train, trained, train.train_mb_tokens)
    # Gradients travel during the backward pass of an update's last micro-batch.
    hidden_s = min(trained, train.train_mb_tokens) * (BACKWARD_OVER_FORWARD * compute_s + exchange_s)
    reduce_bytes, gather_bytes = _replica_bytes(workload)
    in_node = train.num_gpus <= gpu.per_node
    rate = (
        gpu.nvlink_bytes_per_s * assumptions.nvlink_share
        if in_node
        else gpu.network_bytes_per_s * assumptions.network_share
    )
    exposed_s = max(0.0, reduce_bytes / rate - hidden_s) + gather_bytes / rate
    optimizer_s = _OPTIMIZER_BYTES * _optimizer_shard(workload)
    optimizer_s /= gpu.hbm_bytes_per_s * assumptions.hbm_share
    training_s = workload.updates * (update_s + exposed_s + optimizer_s)
    passes = workload.logprob_phases * scored + workload.updates * trained * (forwards + 1)
    between_replicas = workload.updates * (reduce_bytes + gather_bytes)
    flops = workload.num_tokens * training_flops_per_token(model, workload.mean_context)
    return TrainingCost(
        logprobs_s=logprobs_s,
        training_s=training_s,
        exposed_gradients_s=workload.updates * exposed_s,
        nvlink_bytes=passes * exchange.nvlink_bytes + (between_replicas if in_node else 0),
        network_bytes=passes * exchange.network_bytes + (0 if in_node else between_replicas),
        model_flops_share=flops / (training_s * train.num_gpus * gpu.bf16_flops_per_s),
    )


def forward_s(workload: Workload, gpu: GpuDataSheet, assumptions: Assumptions) -> float:
    """Return the seconds that one GPU would take for one token's forward pass through the whole model."""
    model, counts = workload.model, workload.model.parameters
    experts = 2 * counts.num_mixture_layers * counts.num_experts_per_token * counts.expert
    dense = layer_flops_per_token(model) - experts + output_flops_per_token(model)
    attention = attention_flops_per_token(model, workload.mean_context)
    return (
        dense / assumptions.matmul_share
        + experts / assumptions.expert_share
        + attention / assumptions.attention_share
    ) / gpu.bf16_flops_per_s


def busiest_tokens(workload: Workload, updates: int) -> float:
    """Return the tokens of the replica that has most of them, when a step is divided into ``updates``
    updates.

    Sharding balances tokens but keeps samples whole, so a replica may have just the longest sample.
    """
    return max(workload.num_tokens / updates / workload.train.dp, workload.longest_sample)


def bubble(train: TrainLayout, tokens: float, micro_batch_tokens: int) -> float:
    """Return the factor by which filling and draining a pipeline stretches a pass."""
    micro_batches = max(1, math.ceil(tokens / micro_batch_tokens))
    return (micro_batches + train.pp - 1) / micro_batches


def _exchange(workload: Workload, gpu: GpuDataSheet) -> _Exchange:
    """Return the bytes that one GPU sends per token.

    Tensor parallelism reduces twice per layer (Shoeybi et al. 2019; sequence parallelism moves the same
    bytes, Korthikanti et al. 2022). Tokens travel to each of their experts and back. Context parallelism
    passes keys and values around. A pipeline stage passes its output on.
    """
    train, model = workload.train, workload.model
    layers = model.num_layers / train.pp
    tensor = 2 * 2 * (train.tp - 1) / train.tp * model.hidden_size * _BF16 * layers / train.cp
    key_value = model.key_value_width * _BF16
    context = key_value * (train.cp - 1) / train.cp / train.tp * layers
    copies = 2 * model.num_experts_per_token * model.hidden_size * _BF16 * layers / (train.tp * train.cp)
    near = min(train.ep, gpu.per_node)
    stages = model.hidden_size * _BF16 / (train.tp * train.cp) if train.pp > 1 else 0.0
    return _Exchange(
        nvlink_bytes=tensor + context + copies * (near - 1) / train.ep,
        network_bytes=stages + copies * (train.ep - near) / train.ep,
    )


def _parameters_per_gpu(workload: Workload) -> tuple[float, float]:
    """Return how many parameters outside and inside of experts one training GPU holds."""
    train, counts = workload.train, workload.model.parameters
    experts = counts.num_mixture_layers * counts.experts
    return (counts.total - experts) / (train.tp * train.pp), experts / (
        (train.ep if experts else 1) * train.pp
    )


def _replica_bytes(workload: Workload) -> tuple[float, float]:
    """Return the bytes that a GPU sends per update to sum gradients, and to gather the new weights.

    With the distributed optimizer each parameter's gradient is reduced to one GPU, from which its new value
    is gathered.
    """
    train = workload.train
    others, experts = _parameters_per_gpu(workload)
    copies, expert_copies = train.cp * train.dp, train.tp * train.cp * train.dp / train.ep
    sent = others * (copies - 1) / copies + experts * (expert_copies - 1) / expert_copies
    return _GRADIENT_BYTES * sent, _BF16 * sent


def _optimizer_shard(workload: Workload) -> float:
    """Return how many parameters the optimizer on one GPU updates."""
    train = workload.train
    others, experts = _parameters_per_gpu(workload)
    return others / (train.cp * train.dp) + experts / (train.tp * train.cp * train.dp / train.ep)
