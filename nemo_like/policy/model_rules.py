"""Rules on the model of a worker group: how it is divided over ranks, and how long its sequences are."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.config.problems import Problem
from nemo_like.models.adapter_layers import ATTENTION_LAYERS, FEED_FORWARD_LAYERS, adapted_layers
from nemo_like.models.division import must_divide, nearest_divisors
from nemo_like.models.model_info import ModelInfo
from nemo_like.policy.layout import adapters_of, replays_routes, stage_size
from nemo_like.policy.options import PolicyBackend, WorkerGroupConfig


def context_length_problems(name: str, group: WorkerGroupConfig, model: ModelInfo) -> Iterator[Problem]:
    """Yield a problem when sequences may be longer than the model's positions."""
    length = group.max_total_sequence_length
    if length > model.max_position_embeddings:
        yield Problem(
            key=f"{name}.max_total_sequence_length={length}",
            rule=f"must be at most the model's max_position_embeddings={model.max_position_embeddings}",
            remedy="shorten the sequences or use a model with a longer context",
        )


def layout_problems(name: str, group: WorkerGroupConfig, model: ModelInfo) -> Iterator[Problem]:
    """Yield every size of the group's layout that does not divide its model."""
    megatron, fsdp = group.megatron_cfg, group.fsdp_cfg
    parts = {"attention heads": model.num_heads, "key-value heads": model.num_kv_heads}
    if model.num_experts is None:
        parts["FFN columns"] = model.intermediate_size
    if group.backend is PolicyBackend.fsdp:
        yield from must_divide(f"{name}.fsdp_cfg.tensor_parallel_size", fsdp.tensor_parallel_size, parts)
        return
    yield from must_divide(
        f"{name}.megatron_cfg.tensor_model_parallel_size", megatron.tensor_model_parallel_size, parts
    )
    yield from must_divide(
        f"{name}.megatron_cfg.pipeline_model_parallel_size",
        megatron.pipeline_model_parallel_size,
        {"layers": model.num_layers},
    )
    yield from _experts(name, group, model)
    yield from _adapted_experts(name, group, model)


def _experts(name: str, group: WorkerGroupConfig, model: ModelInfo) -> Iterator[Problem]:
    megatron = group.megatron_cfg
    key, ep = f"{name}.megatron_cfg.expert_model_parallel_size", megatron.expert_model_parallel_size
    if model.num_experts is None:
        if ep > 1:
            rule = f"needs a mixture of experts, and this model is of type {model.model_type!r}"
            yield Problem(key=f"{key}={ep}", rule=rule, remedy="set it to 1")
        if megatron.moe_grouped_gemm:
            rule = f"needs a mixture of experts, and this model is of type {model.model_type!r}"
            key = f"{name}.megatron_cfg.moe_grouped_gemm=true"
            yield Problem(key=key, rule=rule, remedy="set it to null")
        if replays_routes(group):
            rule = f"needs a mixture of experts, and this model is of type {model.model_type!r}"
            yield Problem(key=f"{name}.megatron_cfg.router_replay=true", rule=rule, remedy="set it to false")
        return
    yield from must_divide(key, ep, {"experts": model.num_experts})
    ranks = stage_size(group)
    if ep >= 1 and ranks % ep:
        yield Problem(
            key=f"{key}={ep}",
            rule=f"must divide the TP x CP x DP = {ranks} ranks of a pipeline stage",
            remedy=f"try {nearest_divisors(ranks, ep)}",
        )
    if megatron.tensor_model_parallel_size > 1 and not megatron.sequence_parallel:
        yield Problem(
            key=f"{name}.megatron_cfg.sequence_parallel=false",
            rule="must be true for a mixture of experts with tensor parallelism: else every tensor-parallel "
            "rank would compute every expert on every token",
            remedy="set it to true",
        )


def _adapted_experts(name: str, group: WorkerGroupConfig, model: ModelInfo) -> Iterator[Problem]:
    lora = adapters_of(group)
    experts = [layer for layer in adapted_layers(lora) if layer in FEED_FORWARD_LAYERS] if lora else []
    if lora and model.num_experts is not None and experts:
        yield Problem(
            key=f"{name}.lora.target_modules=[{', '.join(lora.target_modules)}]",
            rule=f"asks for adapters beside {', '.join(experts)}, which are experts in this mixture and get "
            f"none with {name}.backend=megatron",
            remedy=f"name layers of the attention: [{', '.join(ATTENTION_LAYERS)}]",
        )
