"""vLLM's arguments, derived from the configuration of this package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm import EngineArgs

from nemo_like.generation.engine_spec import EngineAdapter, EngineSpec
from nemo_like.generation.options import Quantization
from nemo_like.generation.speculation import speculation, with_absolute_draft
from nemo_like.generation.worker_extension import WorkerExtension
from nemo_like.models.family import family_of
from nemo_like.models.model_arithmetic import CPU_BLOCK_TOKENS
from nemo_like.models.model_info import config_of, has_vision_tower
from nemo_like.models.remote_code import loading_arguments
from nemo_like.policy.options import Device

_MIN_BATCHED_TOKENS = 8192
# vLLM's name for the quantization of 16-bit weights whenever they are loaded.
_QUANTIZATIONS = {None: None, Quantization.fp8: "fp8_per_channel"}
_FOR_IMAGES: dict[str, Any] = {
    "limit_mm_per_prompt": {"video": 0},
    "mm_processor_cache_gb": 0,  # all first turns of a prompt's samples are one request: images come once
    # By import path, since engines without images need not load this module.
    "logits_processors": ["nemo_like.generation.no_placeholders:NoPlaceholders"],
}
# The sizes for which vLLM can allocate an adapter.
_MAX_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


def engine_args(spec: EngineSpec) -> EngineArgs:
    """Return the arguments of an engine, without the few that ``complete_args`` sets afterwards.

    Raises TypeError where ``generation.vllm_kwargs`` has an argument that this vLLM does not know.
    """
    cfg, drafts = spec.generation.vllm_cfg, speculation(spec.generation)
    max_total_sequence_length = spec.max_total_sequence_length
    by_device: dict[str, Any]
    if spec.device is Device.cpu:
        if cfg.kv_cache_gib is None:
            raise ValueError(
                "generation.vllm_cfg.kv_cache_gib=null: on CPU the KV cache needs a size; "
                "try 0.125 for a tiny model"
            )
        by_device = {
            "kv_cache_memory_bytes": int(cfg.kv_cache_gib * 2**30),
            "block_size": CPU_BLOCK_TOKENS,
            # A prefix shorter than a block cannot be shared. Where an engine drafts, a prompt of which all
            # tokens but one are shared would begin with a draft, and then draw other random numbers.
            "enable_prefix_caching": max_total_sequence_length > CPU_BLOCK_TOKENS and drafts is None,
        }
    else:
        by_device = {"gpu_memory_utilization": cfg.gpu_memory_utilization, "enable_prefix_caching": True}
    own: dict[str, Any] = dict(
        model=spec.model_name,
        skip_tokenizer_init=True,
        generation_config="vllm",  # the checkpoint's own sampling defaults are ignored
        dtype=spec.precision.name,
        quantization=_QUANTIZATIONS[cfg.quantization],
        seed=spec.seed,
        max_model_len=max_total_sequence_length,
        max_num_seqs=cfg.max_num_seqs,
        max_num_batched_tokens=max(
            _MIN_BATCHED_TOKENS,
            max_total_sequence_length,
            cfg.max_num_seqs * drafts.num_slots if drafts else 0,  # room for every draft: none is cut
        ),
        enable_chunked_prefill=False,  # a partly prefilled request with a seed makes the engine fail
        enforce_eager=cfg.enforce_eager,
        tensor_parallel_size=cfg.tensor_parallel_size,
        pipeline_parallel_size=cfg.pipeline_parallel_size,
        distributed_executor_backend="mp" if cfg.num_workers > 1 else None,
        max_logprobs=-1,  # no limit of its own on how many log-probs a request may ask for
        logprobs_mode="processed_logprobs",  # after temperature, top-p and top-k, as sampled
        disable_log_stats=True,
        worker_extension_cls=f"{WorkerExtension.__module__}.{WorkerExtension.__qualname__}",
        **loading_arguments(),
        per_request_spec_decode_metrics="summary" if drafts else "none",
        **_by_adapter(spec.adapter),
        **_by_family(spec),
        **(_FOR_IMAGES if has_vision_tower(spec.model_name) else {}),
    )
    return EngineArgs(**with_given({**by_device, **own}, with_absolute_draft(spec.generation.vllm_kwargs)))


def with_given(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``own`` with the entries of ``given`` in their place, but for mappings, which are merged, and
    lists, which are joined: a configuration adds to what a model's family needs, and takes nothing away."""
    merged = {**own, **given}
    for name in own.keys() & given.keys():
        if isinstance(own[name], Mapping) and isinstance(given[name], Mapping):
            merged[name] = with_given(own[name], given[name])
        elif isinstance(own[name], list) and isinstance(given[name], list):
            merged[name] = [*own[name], *given[name]]
    return merged


def _by_family(spec: EngineSpec) -> dict[str, Any]:
    """Return the arguments that models of this family need."""
    content = config_of(spec.model_name)
    family = family_of(content.get("model_type"))
    if family is None:
        return {}
    missing = {key: value for key, value in family.engine_config.items() if key not in content}
    of_device = family.cpu_engine if spec.device is Device.cpu else {}
    return {**of_device, **({"hf_overrides": missing} if missing else {})}


def _by_adapter(adapter: EngineAdapter | None) -> dict[str, Any]:
    if adapter is None:
        return {}
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": min(rank for rank in _MAX_LORA_RANKS if rank >= adapter.rank),
        # Other layers are computed as without adapters.
        "lora_target_modules": list(adapter.target_modules) or None,
    }
