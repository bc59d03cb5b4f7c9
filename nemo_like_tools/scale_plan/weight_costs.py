"""Estimates the transfer of weights from trainer to engines, and taking turns where both share GPUs."""

from __future__ import annotations

from dataclasses import dataclass

from nemo_like_tools.scale_plan.hardware import Assumptions, GpuDataSheet
from nemo_like_tools.scale_plan.recipe_workload import Workload

_BF16 = 2
_STATE_BYTES = 2 + 4 + 12  # of a parameter that is trained: weight, gradient, master weight and two moments
# Queries, keys, values and output, besides the norms; three more of each feed-forward part.
_TENSORS_PER_LAYER, _TENSORS_PER_FFN = 4, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightCost:
    """The cost of a weight update. Bytes are of one generating GPU."""

    seconds: float
    loading_s: float  # the part of ``seconds`` in which engines load, tensor by tensor
    received_bytes: float
    over_network: bool


def num_tensors(workload: Workload) -> int:
    """Return how many tensors an update has under Hugging Face names; every expert has three tensors."""
    model = workload.model
    ffn = _TENSORS_PER_FFN * (model.num_experts or 1) + (1 if model.num_experts else 0)
    attention = _TENSORS_PER_LAYER + model.family.norms_per_layer
    attention += (2 if model.has_qk_norm else 0) + (3 if model.has_qkv_bias else 0)
    return model.num_layers * (attention + ffn) + (2 if model.has_tied_embeddings else 3)


def weight_cost(workload: Workload, gpu: GpuDataSheet, assumptions: Assumptions) -> WeightCost:
    """Return the cost of an update: trainer heads join divided tensors, broadcast them, and engines load all
    of them.

    The three parts are assumed not to overlap. Every engine GPU gets the whole model, one pipeline stage
    after another, and keeps its part. When trainer and engines share GPUs, nothing crosses the network, but
    the trainer's state moves to the host and back.
    """
    train, counts = workload.train, workload.model.parameters
    num_bytes = _BF16 * counts.total
    experts = _BF16 * counts.num_mixture_layers * counts.experts
    nvlink = gpu.nvlink_bytes_per_s * assumptions.nvlink_share
    network = gpu.network_bytes_per_s * assumptions.network_share
    near = min(train.ep, gpu.per_node)
    join_s = (num_bytes - experts) / train.pp * (train.tp - 1) / train.tp / nvlink
    join_s += experts / train.pp * ((near - 1) / nvlink + (train.ep - near) / network) / train.ep
    crosses = not workload.shares_gpus and workload.num_gpus > gpu.per_node
    send_s = num_bytes / (network if crosses else nvlink)
    loading_s = num_tensors(workload) * assumptions.load_tensor_s
    parked_s = 0.0
    if workload.shares_gpus:
        state = _STATE_BYTES * counts.total / train.num_gpus
        parked_s = 2 * state / (gpu.host_bytes_per_s * assumptions.host_share)
    return WeightCost(
        seconds=join_s + send_s + loading_s + parked_s,
        loading_s=loading_s,
        received_bytes=num_bytes,
        over_network=crosses,
    )
