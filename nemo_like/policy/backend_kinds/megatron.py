"""Megatron-core, for the models that it has a conversion for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from nemo_like.config.problems import Problem
from nemo_like.models.adapter_layers import (
    ADAPTABLE_LAYERS,
    ALL_LINEAR,
    EXPERT_LAYERS,
    adapted_layers,
    adapts_all_linear,
    named_layers,
    num_adapter_parameters,
    num_expert_adapter_parameters,
)
from nemo_like.models.division import must_divide, nearest_divisors
from nemo_like.models.family import Family, Mixture, Part, described_types, family_of, nearest_type
from nemo_like.models.model_info import ModelInfo, read_model_info
from nemo_like.models.quantization import Form, refusal_of_quantized
from nemo_like.models.rope import known_scaling, rope_settings
from nemo_like.policy.backends.backend_kind import (
    FLOAT32,
    MOMENTS,
    BackendKind,
    HeldMemory,
    Library,
    axis_size,
    weight_bytes_of,
)
from nemo_like.policy.groups.layout import (
    adapters_of,
    layers_of_stage,
    num_chunks,
    parks_optimizer,
    replays_routes,
    spared_moments,
    stage_layers,
    stage_size,
    updates_on_host,
    uses_muon,
)
from nemo_like.policy.groups.parallelism import shards_optimizer
from nemo_like.policy.options import Device, LoraConfig, Precision, TrainedGroupConfig, WorkerGroupConfig

# DeepSeek's routers judge a group of experts by this many best scores.
_JUDGING_EXPERTS = 2


def _problems(name: str, group: WorkerGroupConfig) -> Iterator[Problem]:
    megatron, lora = group.megatron_cfg, adapters_of(group)
    if megatron.sequence_parallel and megatron.tensor_model_parallel_size == 1:
        yield Problem(
            key=f"{name}.megatron_cfg.sequence_parallel=true",
            rule=f"needs {name}.megatron_cfg.tensor_model_parallel_size above 1",
            remedy="set it to false",
        )
    if num_chunks(group) > 1:
        yield from _chunk_problems(name, group)
    if updates_on_host(group):
        yield from _host_update_problems(name, group)
    if parks_optimizer(group) and lora is not None:
        yield Problem(
            key=f"{name}.offload_optimizer_for_logprob=true",
            rule=f"is not for {name}.lora.enabled=true with {name}.backend=megatron: the optimizer of "
            "adapters is small and has no weights of its own",
            remedy="set it to false",
        )
    elif parks_optimizer(group) and group.precision is Precision.float32:
        yield Problem(
            key=f"{name}.offload_optimizer_for_logprob=true",
            rule=f"needs {name}.precision=bfloat16 or float16 with {name}.backend=megatron: in float32 the "
            "optimizer has no weights of its own",
            remedy="set it to false",
        )
    if uses_muon(group) and shards_optimizer(group):
        yield Problem(
            key=f"{name}.megatron_cfg.use_distributed_optimizer=true",
            rule=f"is not for {name}.optimizer.kind=muon, which needs whole matrices, and Megatron-core's "
            "sharded optimizer has flat pieces of them",
            remedy=f"set it to false; {name}.backend=fsdp shards Muon's state",
        )
    yield from _fp8_problems(name, group)
    if lora is not None:
        yield from _adapter_problems(name, lora)
        if isinstance(group, TrainedGroupConfig) and group.megatron_cfg.freeze_moe_router:
            rule = f"has no effect with {name}.lora.enabled=true, where adapters alone train"
            yield Problem(
                key=f"{name}.megatron_cfg.freeze_moe_router=true", rule=rule, remedy="set it to false"
            )


def _chunk_problems(name: str, group: WorkerGroupConfig) -> Iterator[Problem]:
    """Yield a problem for each key beside which a pipeline cannot be interleaved."""
    megatron, of = group.megatron_cfg, f"{name}.megatron_cfg."
    hindering = {
        "pipeline_model_parallel_size=1: there is no pipeline": megatron.pipeline_model_parallel_size == 1,
        "num_layers_in_first_pipeline_stage: chunks are equal": (
            megatron.num_layers_in_first_pipeline_stage is not None
        ),
        "num_layers_in_last_pipeline_stage: chunks are equal": (
            megatron.num_layers_in_last_pipeline_stage is not None
        ),
        "router_replay=true, which counts the layers of a stage from its first one": replays_routes(group),
    }
    for reason, is_so in hindering.items():
        if is_so:
            yield Problem(
                key=f"{of}virtual_pipeline_model_parallel_size={num_chunks(group)}",
                rule=f"is not for {of}{reason}",
                remedy="set it to null",
            )


def _host_update_problems(name: str, group: WorkerGroupConfig) -> Iterator[Problem]:
    """Yield a problem for each key with which Megatron-core's optimizer cannot be on the host."""
    needed = {
        "device=cuda, where there is a host to move to": group.device is Device.cuda,
        "precision=bfloat16: in float32 Megatron-core cannot load its state": (
            group.precision is Precision.bfloat16
        ),
        "lora.enabled=false: the optimizer of adapters is small": adapters_of(group) is None,
        "optimizer.kind=adamw, which is Megatron-core's optimizer there": not uses_muon(group),
        "megatron_cfg.use_distributed_optimizer=true: the others have weights of their own on the GPU": (
            shards_optimizer(group)
        ),
    }
    for rule, is_so in needed.items():
        if not is_so:
            yield Problem(
                key=f"{name}.megatron_cfg.optimizer_cpu_offload=true",
                rule=f"needs {name}.{rule}",
                remedy="set it to false",
            )


def _fp8_problems(name: str, group: WorkerGroupConfig) -> Iterator[Problem]:
    """Yield a problem where linear layers cannot compute in 8 bits."""
    if not isinstance(group, TrainedGroupConfig) or group.megatron_cfg.fp8 is None:
        return
    key = f"{name}.megatron_cfg.fp8={group.megatron_cfg.fp8.value}"
    if group.device is not Device.cuda or group.precision is not Precision.bfloat16:
        yield Problem(
            key=key,
            rule=f"needs {name}.device=cuda and {name}.precision=bfloat16, in which all but the products "
            "of linear layers stays",
            remedy="set it to null",
        )
    elif find_spec("transformer_engine") is None:
        yield Problem(
            key=key,
            rule="needs Transformer Engine, which is not installed",
            remedy="scripts/setup.sh --gpu installs it where there is a C++ compiler; or set it to null",
        )


def _adapter_problems(name: str, lora: LoraConfig) -> Iterator[Problem]:
    """Yield a problem where ``lora`` names a layer that no supported model has."""
    targets = [] if adapts_all_linear(lora) else lora.target_modules
    named = {"target_modules": targets, "exclude_modules": lora.exclude_modules}
    for leaf, layers in named.items():
        unknown = [layer for layer in layers if layer not in (*ADAPTABLE_LAYERS, *EXPERT_LAYERS)]
        if not unknown:
            continue
        close = get_close_matches(unknown[0], ADAPTABLE_LAYERS, n=1)
        yield Problem(
            key=f"{name}.lora.{leaf}=[{', '.join(layers)}]",
            rule=f"names {', '.join(unknown)}, and {name}.backend=megatron has adapters for "
            f"{', '.join(ADAPTABLE_LAYERS)}, or for [{ALL_LINEAR}]",
            remedy=f"did you mean {close[0]}?" if close else "",
        )


def _model_problems(name: str, group: WorkerGroupConfig, model: ModelInfo) -> Iterator[Problem]:
    yield from _stage_problems(name, group, model)
    yield from _expert_problems(name, group, model)
    yield from _adapted_expert_problems(name, group, model)
    yield from _fused_layer_problems(name, group, model)
    yield from _window_problems(name, group, model)
    yield from _fp8_layer_problems(name, group, model)


def _stage_problems(name: str, group: WorkerGroupConfig, model: ModelInfo) -> Iterator[Problem]:
    """Yield a problem where the pipeline's stages cannot have the layers that the keys ask for."""
    megatron = group.megatron_cfg
    size = megatron.pipeline_model_parallel_size
    key = f"{name}.megatron_cfg.pipeline_model_parallel_size"
    given = {
        leaf: number
        for leaf in ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
        if (number := getattr(megatron, leaf)) is not None
    }
    settings = ", ".join(f"{name}.megatron_cfg.{leaf}={number}" for leaf, number in given.items())
    if not given:
        yield from must_divide(key, size, {"layers": model.num_layers})
        chunks = f"{name}.megatron_cfg.virtual_pipeline_model_parallel_size"
        yield from must_divide(chunks, num_chunks(group), {"layers of a stage": model.num_layers // size})
    elif size == 1:
        yield Problem(key=settings, rule=f"needs {key} above 1", remedy="set it to null")
    else:
        try:
            stage_layers(group, model.num_layers)
        except ValueError as error:
            rule = f"does not fit the model's {model.num_layers} layers and {key}={size}: {error}"
            yield Problem(key=settings, rule=rule, remedy="every other stage has equally many layers")


def _expert_problems(name: str, group: WorkerGroupConfig, model: ModelInfo) -> Iterator[Problem]:
    if model.num_experts is None:
        yield from _without_experts(name, group, model)
        return
    megatron = group.megatron_cfg
    key, ep = f"{name}.megatron_cfg.expert_model_parallel_size", megatron.expert_model_parallel_size
    yield from must_divide(key, ep, {"experts": model.num_experts})
    yield from _divided_experts(name, group, model)
    ranks, etp = stage_size(group), megatron.expert_tensor_parallel_size
    if ranks % (ep * etp):
        sharing = f" x expert_tensor_parallel_size={etp}" if etp > 1 else ""
        yield Problem(
            key=f"{key}={ep}{sharing}",
            rule=f"must divide the TP x CP x DP = {ranks} ranks of a pipeline stage",
            remedy=f"try {nearest_divisors(ranks // etp, ep)}",
        )
    if megatron.tensor_model_parallel_size > 1 and not megatron.sequence_parallel:
        yield Problem(
            key=f"{name}.megatron_cfg.sequence_parallel=false",
            rule="must be true for a mixture of experts with tensor parallelism: else every tensor-parallel "
            "rank would compute every expert on every token",
            remedy="set it to true",
        )


def _without_experts(name: str, group: WorkerGroupConfig, model: ModelInfo) -> Iterator[Problem]:
    """Yield a problem for each key of a dense model that is for mixtures."""
    neutral = {
        "expert_model_parallel_size": 1,
        "expert_tensor_parallel_size": 1,
        "moe_grouped_gemm": None,
        "freeze_moe_router": False,
        "router_replay": False,
    }
    for leaf, value in neutral.items():
        given = getattr(group.megatron_cfg, leaf, value)
        if given and given != value:
            rule = f"needs a mixture of experts, and this model is of type {model.model_type!r}"
            shown, remedy = str(given).lower(), "null" if value is None else str(value).lower()
            yield Problem(key=f"{name}.megatron_cfg.{leaf}={shown}", rule=rule, remedy=f"set it to {remedy}")


def _divided_experts(name: str, group: WorkerGroupConfig, model: ModelInfo) -> Iterator[Problem]:
    """Yield every problem of experts of which several ranks have a part each."""
    megatron, leaf = group.megatron_cfg, "expert_tensor_parallel_size"
    size, tp = megatron.expert_tensor_parallel_size, megatron.tensor_model_parallel_size
    key = f"{name}.megatron_cfg.{leaf}"
    if size not in (1, tp):
        yield Problem(
            key=f"{key}={size}",
            rule=f"must be 1, or {name}.megatron_cfg.tensor_model_parallel_size={tp}",
            remedy="with 1 each expert is whole on a rank",
        )
    yield from must_divide(key, size, {"columns of an expert": model.intermediate_size})
    if size > 1 and model.family.has_linear_biases:
        rule = f"must be 1 for a model of type {model.model_type!r}, whose experts have biases"
        yield Problem(key=f"{key}={size}", rule=rule, remedy="set it to 1")
    if size > 1 and megatron.expert_model_parallel_size > 1 and group.device is Device.cpu:
        yield Problem(
            key=f"{key}={size}",
            rule=f"needs GPUs with {name}.megatron_cfg.expert_model_parallel_size="
            f"{megatron.expert_model_parallel_size}: ranks then exchange different numbers of tokens, which "
            "gloo does not",
            remedy="set one of them to 1",
        )
    if size > 1 and megatron.moe_grouped_gemm and find_spec("transformer_engine") is None:
        yield Problem(
            key=f"{name}.megatron_cfg.moe_grouped_gemm=true",
            rule=f"needs Transformer Engine with {key}={size}: there is no other kernel for parts of experts",
            remedy=f"set it to null, or {key}=1",
        )


def _adapted_expert_problems(name: str, group: WorkerGroupConfig, model: ModelInfo) -> Iterator[Problem]:
    """Yield a problem where a dense model is to have adapters beside experts."""
    lora = adapters_of(group)
    of_experts = EXPERT_LAYERS.keys() - {*ADAPTABLE_LAYERS}
    named = [layer for layer in named_layers(lora) if layer in of_experts] if lora else []
    if lora and named and model.num_experts is None:
        yield Problem(
            key=f"{name}.lora.target_modules=[{', '.join(lora.target_modules)}]",
            rule=f"asks for adapters beside {', '.join(named)}, which experts of a mixture have, and this "
            f"model is of type {model.model_type!r}",
            remedy=f"name some of {', '.join(ADAPTABLE_LAYERS)}",
        )


def _window_problems(name: str, group: WorkerGroupConfig, model: ModelInfo) -> Iterator[Problem]:
    length, cp = group.max_total_sequence_length, group.megatron_cfg.context_parallel_size
    if model.window_within(length) is None:
        return
    longest = f"{name}.max_total_sequence_length={length}"
    rule = f"is not for a window of {model.window} tokens in sequences of {longest}"
    if cp > 1:
        key = f"{name}.megatron_cfg.context_parallel_size={cp}"
        yield Problem(key=key, rule=rule, remedy="set it to 1")


def _fused_layer_problems(name: str, group: WorkerGroupConfig, model: ModelInfo) -> Iterator[Problem]:
    lora, layers = adapters_of(group), model.family.linear_layers
    adapted = adapted_layers(lora, model.num_experts) if lora else ()
    fused = [layer for layer in adapted if layer not in layers]
    if lora and fused:
        single = [layer for layer in layers if layer in ADAPTABLE_LAYERS]
        yield Problem(
            key=f"{name}.lora.target_modules=[{', '.join(lora.target_modules)}]",
            rule=f"asks for adapters beside {', '.join(fused)}, and a model of type {model.model_type!r} has "
            f"{', '.join(layers)}",
            remedy=f"set it to [{', '.join(single)}], or set {name}.backend=fsdp",
        )


def _fp8_layer_problems(name: str, group: WorkerGroupConfig, model: ModelInfo) -> Iterator[Problem]:
    fp8 = group.megatron_cfg.fp8 if isinstance(group, TrainedGroupConfig) else None
    if fp8 is not None and model.family.parts:
        yield Problem(
            key=f"{name}.megatron_cfg.fp8={fp8.value}",
            rule="is for Transformer Engine's layers, and those of a model of type "
            f"{model.model_type!r} have other parts",
            remedy="set it to null",
        )


def _held_memory(policy: WorkerGroupConfig, model: ModelInfo, rank: int) -> HeldMemory:
    """Return the memory that a rank of Megatron-core holds: experts are divided over EP, all other weights
    over TP."""
    megatron, counts = policy.megatron_cfg, model.parameters
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    expert_ranks = _expert_ranks(policy)
    stage = rank // stage_size(policy)
    chunks = layers_of_stage(policy, counts.num_layers, stage)
    others = sum(counts.outside_experts_in(layers) for layers in chunks)
    if stage == 0:
        others += counts.input_embeddings
    if stage == pp - 1:
        others += counts.output_layer + counts.final_norm
        if model.has_tied_embeddings and pp > 1:
            others += counts.input_embeddings  # the last stage has a copy
    others //= tp
    experts = sum(counts.experts_in(layers) for layers in chunks) // expert_ranks
    weights = (others + experts) * weight_bytes_of(policy)
    if not isinstance(policy, TrainedGroupConfig):
        return HeldMemory(weights=weights)
    trained_others, trained_experts, lora = others, experts, adapters_of(policy)
    if lora is not None:
        of_experts = num_expert_adapter_parameters(model, lora)
        trained_others = (num_adapter_parameters(model, lora) - of_experts) // (tp * pp)
        trained_experts = of_experts // (expert_ranks * pp)
    # A parameter that trains in float32, as adapters always do, is its own master.
    is_float32 = policy.precision is Precision.float32 or lora is not None
    per_parameter = MOMENTS + (0 if is_float32 else FLOAT32)
    copies = stage_size(policy) // tp if shards_optimizer(policy) else 1
    expert_copies = stage_size(policy) // expert_ranks if shards_optimizer(policy) else 1
    adapters = trained_others + trained_experts if lora is not None else 0
    gradients = (trained_others + trained_experts) * FLOAT32
    updated = trained_others // copies + trained_experts // expert_copies
    # A sharded optimizer copies the weights into one buffer, while the loaded weights are still there.
    # Master weights are made beside the gradients, and moments when gradients may have left.
    is_moved = shards_optimizer(policy) and lora is None
    moved = (trained_others + trained_experts) * weight_bytes_of(policy) * is_moved
    masters = updated * (per_parameter - MOMENTS)
    matrices = sum(counts.matrices_in(layers) for layers in chunks) // tp
    stored, gathered = _in_checkpoint(policy, rank, trained_others, trained_experts, matrices)
    # On the host masters and moments have a copy of the gradients beside them.
    on_host = (per_parameter + FLOAT32) * updated if updates_on_host(policy) else 0
    optimizer = 0 if on_host else per_parameter * updated - spared_moments(policy, matrices + experts)
    return HeldMemory(
        weights=weights + adapters * FLOAT32,
        gradients=gradients,
        optimizer=optimizer,
        starting=max(gradients + max(moved, 0 if on_host else masters), optimizer),
        stored=stored,
        gathered=gathered,
        on_host=on_host,
    )


def _expert_ranks(policy: WorkerGroupConfig) -> int:
    """Return how many ranks hold all experts of a layer between them."""
    return axis_size(policy, "ep") * axis_size(policy, "etp")


def _in_checkpoint(
    policy: WorkerGroupConfig, rank: int, others: int, experts: int, matrices: int
) -> tuple[int, int]:
    """Return the bytes that a rank of Megatron-core writes into a checkpoint, and those that it gathers
    before.

    The first rank of each data-parallel group writes. It first gathers an optimizer that is sharded: for each
    trained parameter its master and two moments. The first ranks of experts and of all other weights differ.
    Muon has one momentum of the experts, and of ``matrices`` among the other weights.
    """
    index = rank % stage_size(policy)
    is_first, has_experts = index < axis_size(policy, "tp"), index < _expert_ranks(policy)
    written = others * is_first + experts * has_experts
    spared = spared_moments(policy, matrices * is_first + experts * has_experts)
    is_float32 = policy.precision is Precision.float32 or adapters_of(policy) is not None
    weights = written * (FLOAT32 if is_float32 else weight_bytes_of(policy))
    if shards_optimizer(policy):
        return weights, written * (FLOAT32 + MOMENTS)
    return weights + written * (MOMENTS + (0 if is_float32 else FLOAT32)) - spared, 0


def _stores_weights(group: TrainedGroupConfig) -> bool:
    is_float32 = group.precision is Precision.float32 or adapters_of(group) is not None
    return shards_optimizer(group) or not is_float32


def _missing_kernels(policy: WorkerGroupConfig) -> Iterator[str]:
    """Yield what training lacks without Transformer Engine, without importing it."""
    if find_spec("transformer_engine") is not None:
        return
    yield (
        "Transformer Engine is not installed, so Megatron-core's own layers train: norms, rotary positions "
        "and SwiGLU pass over the activations more often, which takes time and memory; "
        "scripts/setup.sh --gpu installs it where there is a C++ compiler"
    )
    if policy.precision is not Precision.bfloat16 and _has_experts(policy):
        yield (
            f"policy.precision={policy.precision.value} has no grouped matrix product without Transformer "
            "Engine, so a mixture's experts run one after the other, each on few tokens; "
            "policy.precision=bfloat16 has one"
        )


def _has_experts(policy: WorkerGroupConfig) -> bool:
    is_here = (Path(policy.model_name) / "config.json").is_file()
    return is_here and read_model_info(policy.model_name, policy.backend).num_experts is not None


def _refusal(name: str, content: Mapping[str, Any]) -> tuple[str, str] | None:
    if "vision_config" in content:
        rule = f"has a vision tower (it is of type {content['model_type']!r}), which {name}.backend=megatron"
        return f"{rule} does not train", f"set {name}.backend=fsdp"
    model_type = content.get("model_type")
    family = family_of(model_type)
    if family is None:
        nearest = f", of which {like} is nearest" if (like := nearest_type(model_type)) else ""
        remedy = (
            f"supported are {', '.join(described_types())}{nearest}; {name}.backend=fsdp trains others too"
        )
        return f"is a model of type {model_type!r}", remedy
    form = Form.mxfp4 if family.stacks_experts else Form.fp8_blocks
    if (quantized := refusal_of_quantized(content, reads=form)) is not None:
        return quantized
    for one in family.trained_values:
        if (refusal := one.refusal(name, content)) is not None:
            return refusal
    if family.mixture is not None and (refused := _mixture_refusal(name, content, family.mixture)):
        return refused
    if (unlike := _unlike_counts(content, family)) is not None:
        return unlike, "mend config.json, which must be that of the weights"
    others = {*(content.get("layer_types") or ())} - {"sliding_attention", "full_attention"}
    if Part.mixed_windows in family.parts and others:
        rule = f"has layers of types {', '.join(sorted(others))}, which is not supported"
        return rule, f"set {name}.backend=fsdp"
    if (known := known_scaling(content, family.parts)) is not None:
        rule = f"has rope scaling {rope_settings(content)}, which is not supported"
        return rule, f"use a checkpoint with {known}"
    return None


def _unlike_counts(content: Mapping[str, Any], family: Family) -> str | None:
    """Return which counts in config.json no model can have together; None where all go together."""
    num_layers, types = content.get("num_hidden_layers"), content.get("layer_types")
    if Part.mixed_windows in family.parts and types and len(types) != num_layers:
        return f"has {len(types)} layer_types for num_hidden_layers={num_layers}"
    window = content.get("sliding_window") if family.has_window else None
    if window is not None and not (isinstance(window, int) and window > 0):
        return f"has sliding_window={window}, which must be a positive integer or null"
    if (mixture := family.mixture) is None:
        return None
    num_experts, num_chosen = content.get(mixture.num_experts), content.get(mixture.num_chosen)
    if not isinstance(num_experts, int) or not isinstance(num_chosen, int):
        return None
    groups = content.get(mixture.num_groups) or 1
    if num_chosen > num_experts:
        return f"has {mixture.num_chosen}={num_chosen}, and {num_experts} experts"
    if num_experts % groups:
        return f"has {mixture.num_groups}={groups}, which does not divide its {num_experts} experts"
    return None


def _mixture_refusal(name: str, content: Mapping[str, Any], mixture: Mixture) -> tuple[str, str] | None:
    """Return what is wrong with the layers or the groups of experts, and a remedy; None where they train."""
    num_dense, kinds = content.get(mixture.num_dense_layers) or 0, content.get("mlp_layer_types") or []
    if "dense" in kinds[num_dense:] or "sparse" in kinds[:num_dense]:
        return (
            f"has mlp_layer_types other than {num_dense} dense layers before all others",
            f"set {name}.backend=fsdp",
        )
    groups, chosen_groups = (content.get(key) or 1 for key in (mixture.num_groups, mixture.num_chosen_groups))
    num_chosen = content.get(mixture.num_chosen)
    # Megatron-core judges a group by its best experts: as many as a token gets of each chosen group.
    if groups > 1 and num_chosen != _JUDGING_EXPERTS * chosen_groups:
        rule = f"chooses {num_chosen} experts from {chosen_groups} groups, and {name}.backend=megatron "
        return f"{rule}{_JUDGING_EXPERTS} from each", f"set {name}.backend=fsdp"
    return None


KIND = BackendKind(
    about="Megatron-core, for the models that it has a conversion for",
    backend="nemo_like.policy.megatron.backend:MegatronBackend",
    imported_without=["wandb"],  # which takes half a second, for logs of Megatron-core's own
    part="megatron_cfg",
    axes={
        "tp": "megatron_cfg.tensor_model_parallel_size",
        "cp": "megatron_cfg.context_parallel_size",
        "pp": "megatron_cfg.pipeline_model_parallel_size",
        "ep": "megatron_cfg.expert_model_parallel_size",
        "etp": "megatron_cfg.expert_tensor_parallel_size",
    },
    sequence_parallel="megatron_cfg.sequence_parallel",
    all_gather_weights=False,
    has_stages=True,
    passes_on={"model_kwargs": Library.megatron_model, "optimizer_kwargs": Library.megatron_optimizer},
    held_memory=_held_memory,
    stores_weights=_stores_weights,
    optimizer_sharding="megatron_cfg.use_distributed_optimizer",
    refusal=_refusal,
    problems=_problems,
    model_problems=_model_problems,
    missing_kernels=_missing_kernels,
)
