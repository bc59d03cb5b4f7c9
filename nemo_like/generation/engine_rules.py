"""Rules on engines: whether they can hold the policy's model, and get its adapters alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum

from nemo_like.config.problems import Problem
from nemo_like.generation.draft_rules import cache_problems
from nemo_like.generation.options import GenerationConfig, LoraSync, WeightTransport
from nemo_like.models.adapter_layers import adapted_experts
from nemo_like.models.division import must_divide, nearest_divisors
from nemo_like.models.model_info import ModelInfo, has_vision_tower
from nemo_like.models.quantization import DEQUANTISE
from nemo_like.policy.options import Device, PolicyConfig

# Head sizes for which vLLM has attention on the CPU (CPUAttentionBackend.get_supported_head_sizes).
CPU_HEAD_SIZES: tuple[int, ...] = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
CPU_LATENT_SIZES: tuple[int, ...] = (576,)  # with the rotated part of keys (CPUMLABackend)
LARGEST_ENGINE_RANK = 512  # vLLM's largest max_lora_rank


def engine_layout_problems(
    generation: GenerationConfig, policy: PolicyConfig, model: ModelInfo, *, is_used: bool
) -> Iterator[Problem]:
    """Yield every problem of engines that hold the policy's model. Without ``is_used`` the run has no
    engines, and only the division over tensor-parallel ranks is checked."""
    name = f"policy.model_name={policy.model_name}"
    if is_used and policy.device is Device.cpu and (found := without_cpu_attention(model)):
        what, size, known = found
        rule = f"has {what} of size {size}, and vLLM has attention on the CPU only for {known}"
        yield Problem(key=name, rule=rule, remedy="use another model, or policy.device=cuda")
    if is_used and model.quantization is not None:
        rule = f"has weights in fewer than 16 bits ({model.quantization}), for which engines would take the "
        yield Problem(key=name, rule=f"{rule}trainer's in {policy.precision.value}", remedy=DEQUANTISE)
    if is_used and policy.device is Device.cpu and not generation.vllm_cfg.enforce_eager:
        yield Problem(
            key="generation.vllm_cfg.enforce_eager=false",
            rule="asks for CUDA graphs, which engines have with policy.device=cuda alone",
            remedy="set it to true",
        )
    if is_used:
        yield from cache_problems(generation, policy, model)
    if is_used and policy.device is Device.cpu:
        yield from _unmerged(generation, model)
    key = "generation.vllm_cfg.tensor_parallel_size"
    tp = generation.vllm_cfg.tensor_parallel_size
    yield from must_divide(
        key, tp, {"attention heads": model.num_heads, "FFN columns": model.intermediate_size}
    )
    yield from _stages(generation, policy, model)
    yield from _nodes(generation, policy, model)
    # vLLM gives every rank a copy of a key-value head when there are fewer heads than ranks.
    if tp >= 1 and model.num_kv_heads % tp and tp % model.num_kv_heads:
        yield Problem(
            key=f"{key}={tp}",
            rule=f"must divide the model's {model.num_kv_heads} key-value heads, or be a multiple of them",
            remedy=f"try {nearest_divisors(model.num_kv_heads, tp)}",
        )


def _unmerged(generation: GenerationConfig, model: ModelInfo) -> Iterator[Problem]:
    """Yield a problem for each argument of vLLM that replaces entries which the family's engines need."""
    for name, needed in model.family.cpu_engine.items():
        given = generation.vllm_kwargs.get(name, {})
        if isinstance(needed, Mapping) and not isinstance(given, Mapping):
            yield Problem(
                key=f"generation.vllm_kwargs.{name}={given}",
                rule=f"must be a mapping, which is merged with {needed}: vLLM's engines on CPUs need that "
                f"for a model of type {model.model_type!r}",
                remedy="write entries instead of one value, or leave it out",
            )


def without_cpu_attention(model: ModelInfo) -> tuple[str, int, str] | None:
    """Return what a model has for which vLLM has no attention on the CPU: its name, its size, and the sizes
    for which there is attention. Return None where there is."""
    what, size, known = "attention heads", model.head_size, CPU_HEAD_SIZES
    if model.latent is not None:
        what, size, known = "latents", model.cached_width, CPU_LATENT_SIZES
    return None if size in known else (what, size, ", ".join(map(str, known)))


def _stages(generation: GenerationConfig, policy: PolicyConfig, model: ModelInfo) -> Iterator[Problem]:
    """Yield every problem of engines that are pipelines."""
    key, stages = "generation.vllm_cfg.pipeline_parallel_size", generation.vllm_cfg.pipeline_parallel_size
    yield from must_divide(key, stages, {"layers": model.num_layers})
    if stages > 1:
        rules = {
            _Use.replay: "needs the experts of all layers from one process",
            _Use.drafts: "drafts in a process that has all layers",
            _Use.adapters: "was never tried with engines of several stages",
            _Use.images: "reads images, which was never tried with engines of several stages",
        }
        yield from _refused(_rarely_used(generation, policy, model), rules, f"set {key}=1")


def _nodes(generation: GenerationConfig, policy: PolicyConfig, model: ModelInfo) -> Iterator[Problem]:
    """Yield every problem of engines that are spread over several nodes."""
    vllm, transport = generation.vllm_cfg, generation.weight_transport
    key = "generation.vllm_cfg.num_nodes"
    if vllm.num_workers % max(1, vllm.num_nodes):
        yield Problem(
            key=f"{key}={vllm.num_nodes}",
            rule=f"must divide the {vllm.num_workers} processes of an engine (tensor_parallel_size x "
            "pipeline_parallel_size), since each node has equally many",
            remedy=f"try {nearest_divisors(vllm.num_workers, vllm.num_nodes)}",
        )
    if vllm.num_nodes <= 1:
        return
    untried = "was never tried with engines over several nodes"
    rules = {
        _Use.replay: untried,
        _Use.drafts: untried,
        _Use.adapters: "hands adapters over in memory, which processes on other nodes do not see",
        _Use.images: f"reads images, which {untried}",
    }
    remedy = f"set {key}=1"
    yield from _refused(_rarely_used(generation, policy, model), rules, remedy)
    if transport in (WeightTransport.shared_memory, WeightTransport.cuda_ipc):
        setting = f"generation.weight_transport={transport.value}"
        yield Problem(key=setting, rule="maps memory of one node", remedy=remedy)


class _Use(Enum):
    """A use of engines for which not every layout of theirs is made."""

    replay = "router replay"
    drafts = "drafts"
    adapters = "adapters beside the weights"
    images = "images"


def _rarely_used(generation: GenerationConfig, policy: PolicyConfig, model: ModelInfo) -> dict[_Use, str]:
    """Return the settings that ask for such a use, by the use."""
    found = {}
    if policy.megatron_cfg.router_replay:
        found[_Use.replay] = "policy.megatron_cfg.router_replay=true"
    if generation.vllm_kwargs.get("speculative_config") is not None:
        found[_Use.drafts] = "generation.vllm_kwargs.speculative_config"
    if generation.lora_sync is LoraSync.adapter and policy.lora.enabled:
        found[_Use.adapters] = "generation.lora_sync=adapter"
    if model.has_vision_tower:
        found[_Use.images] = f"policy.model_name={policy.model_name}"
    return found


def _refused(settings: Mapping[_Use, str], rules: Mapping[_Use, str], remedy: str) -> Iterator[Problem]:
    for use, setting in settings.items():
        yield Problem(key=setting, rule=rules[use], remedy=remedy)


def adapter_problems(generation: GenerationConfig, policy: PolicyConfig) -> Iterator[Problem]:
    """Yield every problem with ``generation.lora_sync=adapter``, where engines get adapters alone."""
    lora, sends_adapters = policy.lora, generation.lora_sync is LoraSync.adapter
    if sends_adapters and not lora.enabled:
        yield Problem(
            key="generation.lora_sync=adapter",
            rule="sends adapters, and with policy.lora.enabled=false there are none",
            remedy="set it to merged, or policy.lora.enabled=true",
        )
    if sends_adapters and generation.weight_delta:
        yield Problem(
            key="generation.weight_delta=true",
            rule="saves nothing with generation.lora_sync=adapter, since all values of an adapter change",
            remedy="set it to false",
        )
    if sends_adapters and lora.rank > LARGEST_ENGINE_RANK:
        yield Problem(
            key=f"policy.lora.rank={lora.rank}",
            rule=f"must be at most {LARGEST_ENGINE_RANK} with generation.lora_sync=adapter: vLLM computes no "
            "larger adapters",
            remedy="set generation.lora_sync=merged",
        )


def mixture_problems(
    generation: GenerationConfig, policy: PolicyConfig, model: ModelInfo
) -> Iterator[Problem]:
    """Yield a problem when engines would compute adapters in a mixture of experts where they cannot."""
    if model.num_experts is None or not policy.lora.enabled or generation.lora_sync is LoraSync.merged:
        return
    key, remedy = "generation.lora_sync=adapter", "set it to merged"
    if policy.device is Device.cpu:
        rule = "is impossible for a mixture of experts with policy.device=cpu: an engine with adapters "
        yield Problem(key=key, rule=f"{rule}computes experts by a kernel for GPUs", remedy=remedy)
    elif adapted_experts(policy.lora):
        rule = (
            f"is not for policy.lora.target_modules=[{', '.join(policy.lora.target_modules)}] in a mixture "
        )
        rule += "of experts: vLLM reads the adapters of experts in another order than peft saves them"
        yield Problem(key=key, rule=rule, remedy=remedy)


def cache_size_problems(generation: GenerationConfig, policy: PolicyConfig) -> Iterator[Problem]:
    """Yield a problem when engines on CPUs have no size for their KV cache."""
    if policy.device is Device.cpu and generation.vllm_cfg.kv_cache_gib is None:
        yield Problem(
            key="generation.vllm_cfg.kv_cache_gib=null",
            rule="must be a size with policy.device=cpu, where an engine cannot measure free memory",
            remedy="try 1.0",
        )


def in_flight_problems(generation: GenerationConfig, policy: PolicyConfig) -> Iterator[Problem]:
    """Yield a problem for each feature with which engines err when weights arrive during a sample."""
    key, remedy = "grpo.weight_updates=in_flight", "set grpo.weight_updates=between_samples"
    stages, num_nodes = generation.vllm_cfg.pipeline_parallel_size, generation.vllm_cfg.num_nodes
    rules = {
        f"generation.vllm_cfg.num_nodes={num_nodes}": (
            num_nodes > 1,
            f"was never tried with {key}",
        ),
        f"generation.vllm_cfg.pipeline_parallel_size={stages}": (
            stages > 1,
            f"has a batch in each stage, and with {key} one would be of two policy versions",
        ),
        "policy.megatron_cfg.router_replay=true": (
            policy.megatron_cfg.router_replay,
            f"needs the experts that sampled a token, and with {key} the engine computes tokens again by "
            "other weights",
        ),
        key: (
            has_vision_tower(policy.model_name),
            f"was never tried with a model that reads images, such as {policy.model_name}",
        ),
    }
    if policy.lora.enabled and generation.lora_sync is LoraSync.adapter:
        rule = f"changes adapters that running samples have begun with, and with {key} these go on"
        lora = f"set generation.lora_sync=merged, or {remedy}"
        yield Problem(key="generation.lora_sync=adapter", rule=rule, remedy=lora)
    yield from (
        Problem(key=name, rule=rule, remedy=remedy) for name, (is_set, rule) in rules.items() if is_set
    )
