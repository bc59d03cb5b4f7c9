"""PyTorch's fully_shard (FSDP2), for causal language models of transformers, also with images."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from nemo_like.config.problems import Problem
from nemo_like.models.adapter_layers import DOWN, GATE_AND_UP, adapted_experts, num_adapter_parameters
from nemo_like.models.division import must_divide
from nemo_like.models.model_info import ModelInfo
from nemo_like.models.quantization import refusal_of_quantized
from nemo_like.policy.backends.backend_kind import (
    FLOAT32,
    MOMENTS,
    BackendKind,
    HeldMemory,
    Library,
    weight_bytes_of,
)
from nemo_like.policy.groups.layout import adapters_of, recomputes_layers, spared_moments
from nemo_like.policy.options import Device, LoraConfig, TrainedGroupConfig, WorkerGroupConfig

_GATHERED_LAYERS = 2  # a layer is gathered while the previous layer computes


def _problems(name: str, group: WorkerGroupConfig) -> Iterator[Problem]:
    fsdp = group.fsdp_cfg
    if fsdp.cpu_offload and group.device is Device.cpu:
        yield Problem(
            key=f"{name}.fsdp_cfg.cpu_offload=true",
            rule=f"moves nothing with {name}.device=cpu",
            remedy="set it to false",
        )
    for key in ("offload_parameters_between_phases", "offload_optimizer_for_logprob"):
        if fsdp.cpu_offload and getattr(group, key):
            yield Problem(
                key=f"{name}.{key}=true",
                rule=f"moves nothing with {name}.fsdp_cfg.cpu_offload=true: all of it is on the host already",
                remedy="set it to false",
            )


def _held_memory(policy: WorkerGroupConfig, model: ModelInfo, rank: int) -> HeldMemory:
    """Return the memory that a rank of FSDP holds.

    It holds its part of trained parameters in float32, its part of frozen parameters in the group's
    precision, and a few whole layers at a time.
    """
    tp = policy.fsdp_cfg.tensor_parallel_size
    ranks = tp * policy.fsdp_cfg.context_parallel_size * policy.data_parallel_size
    counts = model.parameters
    trained, frozen, lora = model.num_parameters, 0, adapters_of(policy)
    if not isinstance(policy, TrainedGroupConfig):
        trained, frozen = 0, model.num_parameters
    elif lora is not None:
        trained, frozen = num_adapter_parameters(model, lora), model.num_parameters
    whole_layers = (_GATHERED_LAYERS * counts.layer + counts.input_embeddings) * weight_bytes_of(policy) // tp
    if lora is not None:
        whole_layers += _merged_experts(policy, model, lora) * weight_bytes_of(policy)
    weights = (trained * FLOAT32 + frozen * weight_bytes_of(policy)) // ranks
    gradients, moments = trained * FLOAT32 // ranks, trained * MOMENTS // ranks
    moments -= spared_moments(policy, counts.layer_matrices) // ranks
    stored = trained * FLOAT32 // ranks + moments
    reduces_once = isinstance(policy, TrainedGroupConfig) and policy.fsdp_cfg.reduce_gradients_once
    whole_gradients = trained * FLOAT32 // tp * reduces_once
    if policy.fsdp_cfg.cpu_offload:
        on_host = weights + gradients + moments
        return HeldMemory(
            whole_layers=whole_layers, whole_gradients=whole_gradients, stored=stored, on_host=on_host
        )
    return HeldMemory(
        weights=weights,
        gradients=gradients,
        optimizer=moments,
        starting=moments,
        whole_layers=whole_layers,
        whole_gradients=whole_gradients,
        stored=stored,
    )


def _merged_experts(policy: WorkerGroupConfig, model: ModelInfo, lora: LoraConfig) -> int:
    """Return how many scalars a rank holds of experts' weights with their adapters merged, which peft makes
    in the forward pass, and which the backward pass of each layer needs."""
    shares = {GATE_AND_UP: 2, DOWN: 1}  # of the three matrices of an expert
    adapted = sum(shares[parameter] for parameter in adapted_experts(lora))
    layers = 1 if recomputes_layers(policy) else model.num_mixture_layers
    return layers * model.parameters.experts * adapted // 3


def _model_problems(name: str, group: WorkerGroupConfig, model: ModelInfo) -> Iterator[Problem]:
    fsdp = group.fsdp_cfg
    heads = model.num_heads // fsdp.tensor_parallel_size
    key = f"{name}.fsdp_cfg.context_parallel_size"
    yield from must_divide(key, fsdp.context_parallel_size, {"attention heads on a TP rank": heads})


def adapter_problem(model_directory: str, group: str, lora: LoraConfig) -> str | None:
    """Return why LoRA adapters of the worker group ``group`` cannot be put beside the layers that ``lora``
    names; None when they can.

    Builds the model without weights and tries. Runs in a child process.
    """
    from nemo_like.policy.fsdp.lora import add_adapters
    from nemo_like.policy.fsdp.model import empty_model

    model = empty_model(Path(model_directory))
    try:
        add_adapters(model, group, lora)
    except ValueError as error:
        return str(error)
    return None


def _refusal(name: str, content: Mapping[str, Any]) -> tuple[str, str] | None:
    return refusal_of_quantized(content, reads=None)


KIND = BackendKind(
    about="PyTorch's FSDP2, for any causal language model of transformers",
    backend="nemo_like.policy.fsdp.backend:FSDPBackend",
    part="fsdp_cfg",
    axes={"tp": "fsdp_cfg.tensor_parallel_size", "cp": "fsdp_cfg.context_parallel_size"},
    layout_prefix="FSDP ",
    passes_on={"model_kwargs": Library.transformers},
    held_memory=_held_memory,
    refusal=_refusal,
    problems=_problems,
    model_problems=_model_problems,
    adapter_problem=adapter_problem,
)
