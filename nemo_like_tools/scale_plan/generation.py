"""Estimates what an engine takes to decode its share of a step's samples."""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nemo_like.models.model_arithmetic import (
    attention_flops_per_token,
    kv_bytes_per_token,
    layer_flops_per_token,
    output_flops_per_token,
    weights_read,
)
from nemo_like_tools.scale_plan.hardware import Assumptions, GpuDataSheet
from nemo_like_tools.scale_plan.recipe_workload import LayoutError, Workload

_EMBEDDING_BYTES = 2  # of a weight: bfloat16, also where linear layers have 8 bits
_WATERMARK = 0.01  # share of the KV cache that vLLM keeps free when it admits a request


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationCost:
    """The time of the slowest engine, and the bytes that one of its GPUs moves."""

    seconds: float
    decode_steps: int
    hbm_bytes: float
    link_bytes: float
    spans_nodes: bool  # an engine has GPUs of several nodes, so that its link is the network, not NVLink


@dataclass(slots=True)
class Decoded:
    """The sums over an engine's decoding steps."""

    seconds: float = 0.0
    steps: int = 0
    hbm_bytes: float = 0.0
    link_bytes: float = 0.0


def generation_cost(workload: Workload, gpu: GpuDataSheet, assumptions: Assumptions) -> GenerationCost:
    """Return the cost of prefill and decoding on the engine with the most and the longest responses.

    Raises LayoutError when an engine's GPUs do not hold its weights and one response.
    """
    lengths = slowest_engine_lengths(workload)
    decoded = decode(
        lengths,
        workload.max_num_seqs,
        kv_tokens(workload, gpu, assumptions),
        workload.prompt_tokens,
        lambda num, context: decode_step(workload, gpu, assumptions, num, context),
    )
    # A group's prompt is computed once: its other samples find it in the prefix cache.
    num_prefilled = math.ceil(workload.num_prompts / workload.num_engines) * workload.prompt_tokens
    flops = num_prefilled * (
        layer_flops_per_token(workload.model)
        + attention_flops_per_token(workload.model, workload.prompt_tokens / 2)
    )
    rate = workload.engine_tp * gpu.bf16_flops_per_s * assumptions.decode_matmul_share
    return GenerationCost(
        seconds=decoded.seconds + flops / rate,
        decode_steps=decoded.steps,
        hbm_bytes=decoded.hbm_bytes,
        link_bytes=decoded.link_bytes,
        spans_nodes=workload.engine_tp > gpu.per_node,
    )


def slowest_engine_lengths(workload: Workload) -> list[int]:
    """Return the lengths of the responses of the engine that ends last.

    Engines get whole groups in turn. All samples, sorted by length, have the distribution's quantiles as
    lengths; of each run of consecutive samples, one per busy engine, this engine gets the longest.
    """
    busy = min(workload.num_engines, workload.num_prompts)
    count = math.ceil(workload.num_prompts / workload.num_engines) * workload.group_size
    return [
        max(1, round(workload.lengths.quantile(((run + 1) * busy - 0.5) / (count * busy))))
        for run in range(count)
    ]


def kv_tokens(workload: Workload, gpu: GpuDataSheet, assumptions: Assumptions) -> int:
    """Return how many tokens an engine's KV cache holds.

    Raises LayoutError when the cache does not hold one sample.
    """
    counts = workload.model.parameters
    weights = _weight_bytes(workload, counts.total, counts.embeddings) / workload.engine_tp
    room = gpu.hbm_bytes * workload.hbm_utilization - weights - assumptions.reserved_hbm_bytes
    # With more ranks than KV heads, tensor parallelism stores copies.
    shards = min(workload.engine_tp, workload.model.num_cached_heads)
    tokens = int(room / (kv_bytes_per_token(workload.model) / shards))
    if tokens < workload.prompt_tokens + workload.lengths.longest:
        raise LayoutError(
            f"an engine's weights, {weights / 1e9:.0f} GB a GPU, leave no room for a KV cache on {gpu.name}; "
            "try another --gpu"
        )
    return tokens


def _weight_bytes(workload: Workload, num_parameters: float, num_in_embeddings: float) -> float:
    """Return the bytes of an engine's parameters, some of which are in embeddings."""
    linear = workload.linear_bytes * (num_parameters - num_in_embeddings)
    return linear + _EMBEDDING_BYTES * num_in_embeddings


@dataclass(slots=True, eq=False)
class _Response:
    length: int
    done: int = 0  # tokens that it had when it was admitted last
    admitted: int = 0  # the engine's step at that time


def decode(
    lengths: Sequence[int],
    max_sequences: int,
    max_tokens: int,
    prompt_tokens: int,
    step: Callable[[int, float], tuple[float, float, float]],
) -> Decoded:
    """Decode all responses, at most ``max_sequences`` together and ``max_tokens`` in the KV cache.

    A waiting response starts as soon as there is room. When the cache is full, the response that started last
    waits with the tokens that it has; computing their KV cache again is not counted. ``step(num_sequences,
    context_tokens)`` returns the seconds, the HBM bytes and the link bytes of one step.
    """
    # Engines do not know the lengths, so the order is random.
    waiting = deque(_Response(length) for length in random.Random(0).sample(lengths, len(lengths)))
    active: list[_Response] = []  # in the order of their admission
    decoded, context = Decoded(), 0.0
    while waiting or active:
        while waiting and len(active) < max_sequences:
            needed = prompt_tokens + waiting[0].done
            if active and context + needed + len(active) + 1 > max_tokens * (1 - _WATERMARK):
                break
            response = waiting.popleft()
            response.admitted = decoded.steps
            active.append(response)
            context += needed
        soonest = min(one.admitted + one.length - one.done for one in active) - decoded.steps
        until_full = int((max_tokens - context) / len(active))
        if until_full < 1 and len(active) > 1:
            last = active.pop()
            last.done += decoded.steps - last.admitted
            context -= prompt_tokens + last.done
            waiting.appendleft(last)
            continue
        count = max(1, min(soonest, until_full))
        costs = step(len(active), context + len(active) * count / 2)
        decoded.seconds += count * costs[0]
        decoded.hbm_bytes += count * costs[1]
        decoded.link_bytes += count * costs[2]
        decoded.steps += count
        context += len(active) * count
        ended = [one for one in active if one.admitted + one.length - one.done == decoded.steps]
        context -= sum(prompt_tokens + one.length for one in ended)
        active = [one for one in active if one not in ended]
    return decoded


def decode_step(
    workload: Workload, gpu: GpuDataSheet, assumptions: Assumptions, num_sequences: int, context_tokens: float
) -> tuple[float, float, float]:
    """Return the seconds of one decoding step, and the HBM and link bytes of each of the engine's GPUs."""
    model, tp = workload.model, workload.engine_tp
    kv = kv_bytes_per_token(model) * context_tokens / min(tp, model.num_cached_heads)
    counts = model.parameters
    output = counts.output_layer or counts.input_embeddings
    hbm_bytes = _weight_bytes(workload, weights_read(model, num_sequences), output) / tp + kv
    flops: float = num_sequences * (layer_flops_per_token(model) + output_flops_per_token(model))
    flops += attention_flops_per_token(model, context_tokens)
    work_s = max(
        hbm_bytes / (gpu.hbm_bytes_per_s * assumptions.hbm_share),
        flops / (tp * gpu.bf16_flops_per_s * assumptions.decode_matmul_share),
    )
    per_layer_s = (
        assumptions.decode_layer_s if model.num_experts is None else assumptions.decode_expert_layer_s
    )
    fixed_s = (
        assumptions.decode_host_s
        + model.num_layers * per_layer_s
        + num_sequences * assumptions.decode_sequence_s
    )
    if tp == 1:
        return work_s + fixed_s, hbm_bytes, 0.0
    in_node = tp <= gpu.per_node
    rate, latency = (
        (gpu.nvlink_bytes_per_s * assumptions.nvlink_share, assumptions.allreduce_s)
        if in_node
        else (gpu.network_bytes_per_s * assumptions.network_share, assumptions.network_allreduce_s)
    )
    link_bytes = 2 * model.num_layers * num_sequences * model.hidden_size * 2 * 2 * (tp - 1) / tp
    reduce_s = 2 * model.num_layers * latency + link_bytes / rate
    return work_s + fixed_s + reduce_s, hbm_bytes, link_bytes
