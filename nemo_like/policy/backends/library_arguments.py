"""Arguments of vLLM, Megatron-core and transformers that a configuration passes on as they are.

    generation.vllm_kwargs                 vLLM's EngineArgs
    policy.megatron_cfg.model_kwargs       Megatron-core's TransformerConfig
    policy.megatron_cfg.optimizer_kwargs   Megatron-core's OptimizerConfig
    policy.fsdp_cfg.model_kwargs           what transformers takes when it builds a model

An argument that this framework sets or relies on is refused. ``preflight.taken_arguments`` checks that the
installed library takes all other arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_like.algorithms.options import GRPOConfig
from nemo_like.config import fields
from nemo_like.config.problems import Problem
from nemo_like.generation.options import GenerationConfig
from nemo_like.policy.backends.backend_kind import Library, backend_kind_of
from nemo_like.policy.groups.layout import recomputes_layers
from nemo_like.policy.options import WorkerGroupConfig


@dataclass(frozen=True, slots=True)
class PassedArguments:
    """The arguments under one key of the configuration."""

    key: str
    library: Library
    values: Mapping[str, Any]


# By argument, the key that sets it; ``{group}`` stands for the worker group's name.
KEYS: Mapping[Library, Mapping[str, str]] = {
    Library.vllm: {
        "model": "policy.model_name",
        "dtype": "policy.precision",
        "seed": "grpo.seed",
        "max_model_len": "policy.max_total_sequence_length",
        "max_num_seqs": "generation.vllm_cfg.max_num_seqs",
        "tensor_parallel_size": "generation.vllm_cfg.tensor_parallel_size",
        "pipeline_parallel_size": "generation.vllm_cfg.pipeline_parallel_size",
        "nnodes": "generation.vllm_cfg.num_nodes",
        "enforce_eager": "generation.vllm_cfg.enforce_eager",
        "gpu_memory_utilization": "generation.vllm_cfg.gpu_memory_utilization",
        "kv_cache_memory_bytes": "generation.vllm_cfg.kv_cache_gib",
        "quantization": "generation.vllm_cfg.quantization",
        "quantization_config": "generation.vllm_cfg.quantization",
        "enable_return_routed_experts": "policy.megatron_cfg.router_replay",
        "enable_lora": "generation.lora_sync",
        "max_lora_rank": "policy.lora.rank",
        "lora_target_modules": "policy.lora.target_modules",
        "trust_remote_code": "policy.trust_remote_code",
    },
    Library.megatron_model: {
        "tensor_model_parallel_size": "{group}.megatron_cfg.tensor_model_parallel_size",
        "pipeline_model_parallel_size": "{group}.megatron_cfg.pipeline_model_parallel_size",
        "virtual_pipeline_model_parallel_size": "{group}.megatron_cfg.virtual_pipeline_model_parallel_size",
        "num_layers_in_first_pipeline_stage": "{group}.megatron_cfg.num_layers_in_first_pipeline_stage",
        "num_layers_in_last_pipeline_stage": "{group}.megatron_cfg.num_layers_in_last_pipeline_stage",
        "context_parallel_size": "{group}.megatron_cfg.context_parallel_size",
        "expert_model_parallel_size": "{group}.megatron_cfg.expert_model_parallel_size",
        "expert_tensor_parallel_size": "{group}.megatron_cfg.expert_tensor_parallel_size",
        "sequence_parallel": "{group}.megatron_cfg.sequence_parallel",
        "moe_grouped_gemm": "{group}.megatron_cfg.moe_grouped_gemm",
        "fp8": "{group}.megatron_cfg.fp8",
        "fp8_recipe": "{group}.megatron_cfg.fp8_recipe",
        "moe_enable_routing_replay": "{group}.megatron_cfg.router_replay",
        **dict.fromkeys(("params_dtype", "pipeline_dtype", "bf16", "fp16"), "{group}.precision"),
    },
    Library.megatron_optimizer: {
        "optimizer": "{group}.optimizer.kind",
        "lr": "{group}.optimizer.lr",
        "min_lr": "{group}.scheduler.min_lr",
        "weight_decay": "{group}.optimizer.weight_decay",
        "adam_beta1": "{group}.optimizer.adam_beta1",
        "adam_beta2": "{group}.optimizer.adam_beta2",
        "adam_eps": "{group}.optimizer.adam_eps",
        "muon_momentum": "{group}.optimizer.muon_momentum",
        "muon_use_nesterov": "{group}.optimizer.muon_nesterov",
        "muon_num_ns_steps": "{group}.optimizer.muon_ns_steps",
        "muon_extra_scale_factor": "{group}.optimizer.muon_scale",
        "clip_grad": "{group}.max_grad_norm",
        "use_distributed_optimizer": "{group}.megatron_cfg.use_distributed_optimizer",
        "optimizer_cpu_offload": "{group}.megatron_cfg.optimizer_cpu_offload",
        "optimizer_offload_fraction": "{group}.megatron_cfg.optimizer_cpu_offload",
        **dict.fromkeys(("params_dtype", "bf16", "fp16"), "{group}.precision"),
        **{
            name: f"{{group}}.loss_scaling.{name}"
            for name in ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "hysteresis")
        },
    },
    Library.transformers: {
        **dict.fromkeys(("dtype", "torch_dtype"), "{group}.precision"),
        "trust_remote_code": "policy.trust_remote_code",
    },
}


def _by_argument(reasons: Mapping[str, str]) -> dict[str, str]:
    return {name: reason for reason, names in reasons.items() for name in names.split()}


_OF_CHECKPOINT = "is part of what the model computes, which its checkpoint says"

# By argument, why a configuration must not set it.
RELIED_ON: Mapping[Library, Mapping[str, str]] = {
    Library.vllm: _by_argument(
        {
            "would change the log-probs, which must be those of what was sampled from": (
                "logprobs_mode max_logprobs"
            ),
            "is how weights get into an engine": (
                "worker_extension_cls worker_cls weight_transfer_config load_format model_weights"
            ),
            "is what has engines sleep while the policy trains": (
                "enable_sleep_mode sleep_mode_offload_cudagraph sleep_preserve_parameter_names"
                " enable_cumem_allocator enable_nccl_comm_suspend"
            ),
            "follows from the plan of processes": (
                "distributed_executor_backend node_rank master_addr master_port"
                " device_ids data_parallel_rank data_parallel_start_rank data_parallel_size_local"
                " data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb"
                " data_parallel_external_lb data_parallel_backend enable_elastic_ep"
            ),
            "is, for a dense model, the same as more engines, and cannot be kept in step with weight updates "
            "for a mixture of experts; set generation.num_engines, and to divide a mixture's experts "
            "generation.vllm_cfg.tensor_parallel_size with generation.vllm_kwargs.enable_expert_parallel": (
                "data_parallel_size"
            ),
            "would have an engine read text, and it gets token ids": (
                "tokenizer skip_tokenizer_init tokenizer_mode tokenizer_revision tokens_only"
            ),
            "would change the sampling, which generation sets for every request": (
                "generation_config override_generation_config"
            ),
            "must be off: vLLM fails with requests that have a seed and are read in parts": (
                "enable_chunked_prefill"
            ),
            "belongs to the order of requests, which a journal repeats": "scheduler_cls scheduling_policy",
            "belongs to adapters, which policy.lora describes": "max_loras max_cpu_loras lora_dtype",
            "serves agents and images as it is": (
                "structured_outputs_config logits_processors limit_mm_per_prompt mm_processor_cache_gb"
                " language_model_only"
            ),
            _OF_CHECKPOINT: (
                "hf_overrides model_class_overrides hf_config_path config_format runner convert revision"
                " model_impl"
            ),
            "is how metrics of an engine are counted": "disable_log_stats per_request_spec_decode_metrics",
            "is a part of speculative_config; set that": "spec_method spec_model spec_tokens",
        }
    ),
    Library.megatron_model: _by_argument(
        {
            _OF_CHECKPOINT: (
                "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels"
                " normalization layernorm_epsilon layernorm_zero_centered_gamma qk_layernorm qk_l2_norm"
                " add_qkv_bias add_bias_linear gated_linear_unit activation_func glu_linear_offset"
                " activation_func_clamp_value softmax_scale softmax_type window_size window_attn_skip_freq"
                " rotary_interleaved no_rope_freq attention_output_gate multi_latent_attention"
                " apply_query_key_layer_scaling apply_residual_connection_post_layernorm num_moe_experts"
                " moe_router_topk moe_router_pre_softmax moe_router_score_function moe_layer_freq"
                " moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_router_topk_scaling_factor"
                " moe_router_num_groups moe_router_group_topk mtp_num_layers transformer_impl"
            ),
            "must be 0, so that the policy that trains is the one that sampled": (
                "hidden_dropout attention_dropout moe_input_jitter_eps"
            ),
            "would drop tokens of samples": "moe_expert_capacity_factor moe_pad_expert_input_to_capacity",
            "would add to the loss": ("moe_router_load_balancing_type moe_aux_loss_coeff moe_z_loss_coeff"),
            "belongs to how gradients are summed and normalised": (
                "calculate_per_token_loss grad_scale_func no_sync_func grad_sync_func param_sync_func"
                " finalize_model_grads_func"
            ),
            "follows from the kernels that are installed": (
                "persist_layer_norm gradient_accumulation_fusion masked_softmax_fusion bias_activation_fusion"
                " use_te_activation_func bias_dropout_fusion apply_rope_fusion attention_softmax_in_fp32"
            ),
            "is how weights get into the model": "perform_initialization use_cpu_initialization",
            "would keep weights in 8 bits, and engines and checkpoints get them in bfloat16": "fp8_param",
            "belongs to the pipeline's schedule": (
                "deallocate_pipeline_outputs batch_p2p_comm variable_seq_lengths overlap_p2p_comm"
                " pipeline_model_parallel_layout microbatch_group_size_per_vp_stage"
            ),
        }
    ),
    Library.megatron_optimizer: _by_argument(
        {
            "is of Megatron-core's own Muon, and optimizer.kind=muon is ours": (
                "muon_split_qkv muon_scale_mode muon_fp32_matmul_prec muon_tp_mode"
            ),
            "is 1, since the backend scales losses by keys of loss_scaling": "loss_scale",
            "belongs to how gradients are summed": (
                "overlap_param_gather overlap_param_gather_with_optimizer_step"
            ),
        }
    ),
    Library.transformers: {},
}
_RECOMPUTATION = ("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules")
_ATTENTION = "attn_implementation"
_DISPATCHERS = ("alltoall", "flex")
_TWO_VERSIONS = "computes a step ahead, which would belong to two versions with grpo.max_staleness above 0"


def passed_to_engines(generation: GenerationConfig) -> list[PassedArguments]:
    """Return the arguments that a configuration passes on to engines; empty where it passes none."""
    passed = PassedArguments("generation.vllm_kwargs", Library.vllm, generation.vllm_kwargs)
    return [passed] if passed.values else []


def passed_to_workers(name: str, group: WorkerGroupConfig) -> list[PassedArguments]:
    """Return the arguments that the workers of the group ``name`` pass on; empty where they pass none."""
    kind = backend_kind_of(group)
    own = getattr(group, kind.part, None)
    return [
        PassedArguments(f"{name}.{kind.part}.{key}", library, values)
        for key, library in kind.passes_on.items()
        if (values := getattr(own, key, None))  # a group that does not train has no optimizer
    ]


def engine_argument_problems(generation: GenerationConfig, grpo: GRPOConfig) -> Iterator[Problem]:
    """Yield a problem for every engine argument that has its own key, or that this framework relies on."""
    for passed in passed_to_engines(generation):
        for argument, value in passed.values.items():
            is_ahead = argument == "async_scheduling" and value and grpo.max_staleness > 0
            reason = _TWO_VERSIONS if is_ahead else ""
            yield from _problem(passed, argument, KEYS[passed.library].get(argument), reason)


def worker_argument_problems(name: str, group: WorkerGroupConfig) -> Iterator[Problem]:
    """Yield a problem for every worker argument of the group ``name`` that has its own key, or that this
    framework relies on."""
    for passed in passed_to_workers(name, group):
        for argument, value in passed.values.items():
            key = KEYS[passed.library].get(argument)
            reason = _reason(name, group, passed.library, argument, value)
            if key is not None and fields.find(type(group), key.removeprefix("{group}.")) is None:
                key, reason = None, f"is for training, and the group {name} does not train"
            own = None if key is None else key.format(group=name)
            yield from _problem(passed, argument, own, reason)


def _problem(passed: PassedArguments, argument: str, key: str | None, reason: str) -> Iterator[Problem]:
    """Yield the problem of an argument that ``key`` sets, or that is refused for a ``reason``; else
    nothing."""
    shown = f"{passed.key}.{argument}={passed.values[argument]}"
    reason = RELIED_ON[passed.library].get(argument, reason)
    if key is not None:
        yield Problem(key=shown, rule=f"is set by {key}", remedy=f"set {key} and leave this out")
    elif reason:
        rule, _, remedy = reason.partition("; ")
        yield Problem(key=shown, rule=rule, remedy=remedy or "leave it out")


def _reason(name: str, group: WorkerGroupConfig, library: Library, argument: str, value: Any) -> str:
    """Return why an argument is refused beside the other keys of its group; an empty text where it is not."""
    if library is Library.megatron_model:
        if argument in _RECOMPUTATION and recomputes_layers(group):
            return f"is set by {name}.megatron_cfg.activation_checkpointing=true; set that to false"
        if argument == "moe_token_dispatcher_type" and value not in _DISPATCHERS:
            return "does not take micro-batches of different lengths; use " + " or ".join(_DISPATCHERS)
    if library is Library.transformers and argument == _ATTENTION and group.sequence_packing.enabled:
        return f"is set by {name}.sequence_packing.enabled=true, which has attention of its own"
    return ""
