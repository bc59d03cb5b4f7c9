"""What NeMo-RL's keys are here. A key that is not in the table and exists in both means the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from nemo_like.config.frameworks import nemo_rl_values as to
from nemo_like.config.frameworks.entries import (
    LEFT_OUT,
    Always,
    Entry,
    Framework,
    Here,
    Missing,
    NoEffect,
    Switch,
    Theirs,
)
from nemo_like.config.frameworks.nemo_rl_data import environment, prompt_text, source_list, sources
from nemo_like.config.frameworks.value_changes import (
    CRITICS_ROUTERS,
    PRECISIONS,
    all_tokens,
    item,
    model_directory,
    one_of,
    period,
)

_NO_KEY = "nothing to set"
_SPEED = "a matter of speed and memory, which the backend here settles itself"
_SERVED = "settings of a server or port that does not exist here"
_NO_ADAPTER_OPTION = "adapters have rank, alpha, dropout and target_modules"
_LORA_ALPHA = "an adapter's output is multiplied by alpha / rank in both"
_UPDATES = "counted in optimizer updates: x the updates of a step"


def _adapters(theirs: str, targets: Any, options: Sequence[str]) -> dict[str, Entry]:
    """Return the entries of a group of adapters."""
    return {
        f"{theirs}.enabled": "policy.lora.enabled",
        f"{theirs}.dim": "policy.lora.rank",
        f"{theirs}.alpha": Here("policy.lora.alpha", _LORA_ALPHA),
        f"{theirs}.dropout": "policy.lora.dropout",
        f"{theirs}.target_modules": Here(
            "policy.lora.target_modules", "an empty list is `[all-linear]`; names as in transformers", targets
        ),
        f"{theirs}.exclude_modules": Missing(
            "adapters are on the layers of policy.lora.target_modules; name the others there", (None, [])
        ),
        **{f"{theirs}.{name}": NoEffect(_NO_ADAPTER_OPTION) for name in options},
    }


_OVERLAP = "grpo.max_staleness and grpo.weight_updates say it, see docs/async.md"
_KV_CACHE = Here(
    "generation.kv_cache_after_update",
    "true is `recompute`, false `keep`",
    lambda value, theirs: "recompute" if value else "keep",
)


def _overlap(theirs: str) -> dict[str, Entry]:
    """Return the entries of a group for rollouts that run ahead of training."""
    return {
        f"{theirs}.enabled": Here(
            "grpo.max_staleness",
            "true is max_trajectory_age_steps, false 0",
            lambda value, each: int(each(f"{theirs}.max_trajectory_age_steps", 1)) if value else 0,
        ),
        f"{theirs}.max_trajectory_age_steps": Here(
            "grpo.max_staleness", "see enabled", lambda value, each: LEFT_OUT
        ),
        f"{theirs}.in_flight_weight_updates": Here(
            "grpo.weight_updates",
            "true is `in_flight`, false `between_samples`",
            lambda value, theirs: "in_flight" if value else "between_samples",
        ),
        f"{theirs}.recompute_kv_cache_after_weight_updates": _KV_CACHE,
        f"{theirs}": NoEffect(_OVERLAP),
    }


_GRPO: dict[str, Entry] = {
    "grpo.max_rollout_turns": Here("env.<name>.max_turns", "of each environment; 1 is usual", to.turns),
    "grpo.max_num_epochs": Missing(
        "a run ends after grpo.max_num_steps alone; set it to epochs x problems / grpo.num_prompts_per_step"
    ),
    "grpo.normalize_rewards": Here(
        "grpo.normalize_rewards", "of the estimator grpo", to.of_grpo("normalize_rewards")
    ),
    "grpo.use_leave_one_out_baseline": Here(
        "grpo.use_leave_one_out_baseline",
        "of the estimator grpo",
        to.of_grpo("use_leave_one_out_baseline"),
    ),
    "grpo.adv_estimator.name": Here(
        "grpo.adv_estimator.name",
        "`reinforce_plus_plus` with `minus_baseline` is `reinforce_plus_plus_baseline`",
        to.estimator,
    ),
    "grpo.adv_estimator.normalize_rewards": Here(
        "grpo.normalize_rewards", "of the estimator grpo", to.of_grpo("normalize_rewards")
    ),
    "grpo.adv_estimator.use_leave_one_out_baseline": Here(
        "grpo.use_leave_one_out_baseline",
        "of the estimator grpo",
        to.of_grpo("use_leave_one_out_baseline"),
    ),
    "grpo.adv_estimator.minus_baseline": Here(
        "grpo.adv_estimator.name", "see name", lambda value, theirs: LEFT_OUT
    ),
    "grpo.adv_estimator.reward_weights": Missing(
        "weights go by the components' names; set grpo.adv_estimator.reward_weights={NAME: WEIGHT}", (None,)
    ),
    "grpo.val_period": Here("grpo.val_period", "below 1 is 0: never", period),
    "grpo.val_start_at": Missing("validation has no first step; set grpo.val_at_start=false", (None, -1, 0)),
    "grpo.val_num_generations_per_prompt": "grpo.num_val_generations_per_prompt",
    "grpo.stop_at_validation_metric": Here(
        "grpo.val_stop_metric",
        "with its prefix, `validation/`",
        lambda value, theirs: LEFT_OUT if value is None else to.metric(value, theirs),
    ),
    "grpo.stop_at_validation_threshold": "grpo.val_stop_threshold",
    "grpo.val_batch_size": NoEffect("engines get all problems of a validation at once"),
    "grpo.batch_multiplier": Missing(
        "each rollout of dynamic sampling is of grpo.num_prompts_per_step prompts; raise "
        "grpo.dynamic_sampling_max_gen_batches if steps run out of rollouts",
        (None, 1),
    ),
    "grpo.advantage_clip_low": Missing("advantages are not clipped; bound rewards by grpo.reward_scaling"),
    "grpo.advantage_clip_high": Missing("advantages are not clipped; bound rewards by grpo.reward_scaling"),
    "grpo.invalid_tool_call_advantage": Missing("let the environment's reward punish such calls"),
    "grpo.malformed_thinking_advantage": Missing("let the environment's reward punish such text"),
    "grpo.skip_reference_policy_logprobs_calculation": NoEffect(
        "a reference model is kept only where loss_fn.reference_policy_kl_penalty is above 0"
    ),
    **_overlap("grpo.async_grpo"),
    "async_rl.sampler.max_lookahead_versions": "grpo.max_staleness",
    "async_rl.recompute_kv_cache_after_weight_updates": _KV_CACHE,
    "async_rl": NoEffect(_OVERLAP),
    "reward_penalties.token_ids": NoEffect("goes with the penalties"),
    "reward_penalties": Missing("let the environment's reward punish such responses", (None, False, {})),
}

_LOSS: dict[str, Entry] = {
    "loss_fn.kl_input_clamp_value": Always((20.0,), "the KL's log-ratio is clamped to 20; leave it out"),
    "loss_fn.kl_output_clamp_value": Always((10.0,), "the KL is clamped to 10; leave it out"),
    "loss_fn.use_on_policy_kl_approximation": Missing(
        "the KL is not weighed by an importance ratio; see docs/losses.md"
    ),
    "loss_fn.truncated_importance_sampling_type": Here(
        "loss_fn.truncated_importance_sampling_type",
        "`seq-mask-tis` is `seq_mask`",
        one_of(
            {None: None, "tis": "tis", "icepop": "icepop", "seq-mask-tis": "seq_mask"}, "see docs/losses.md"
        ),
    ),
    "loss_fn.positive_example_nll_weight": Missing(
        "the loss has no likelihood term; write one as loss_fn.kind, see docs/losses.md", (None, 0, 0.0)
    ),
}

_CHECKPOINTING: dict[str, Entry] = {
    "checkpointing.metric_name": Here(
        "checkpointing.metric_name",
        "`val:NAME` is `validation/NAME`, `train:NAME` `train/NAME`",
        to.metric,
    ),
    "checkpointing.model_save_format": NoEffect("a checkpoint has a format of its own"),
    "checkpointing.save_consolidated": NoEffect("checkpointing.export_final_hf writes the whole model"),
    "checkpointing.save_optimizer": Always((True,), "a checkpoint has all that a run needs to continue"),
    "checkpointing.pretrained_checkpoint": Missing(
        "a model is a Hugging Face directory; convert the checkpoint and name it in policy.model_name"
    ),
}

_POLICY: dict[str, Entry] = {
    "policy.model_name": Here("policy.model_name", "a directory, not a name on the hub", model_directory),
    "policy.tokenizer.name": Here(
        "policy.model_name", "the tokenizer is that of the model's directory", to.tokenizer
    ),
    "policy.tokenizer.chat_template": Missing(
        "write the template into a file and name it in data.chat_template", (None, "default")
    ),
    "policy.tokenizer.chat_template_kwargs": Missing(
        "a template gets no arguments; write them into a template of your own, data.chat_template",
        (None, {}),
    ),
    "policy.tokenizer.use_fastokens": NoEffect("a matter of speed"),
    "policy.hf_config_overrides": Missing("change config.json in the model's directory", (None, {})),
    "policy.generation_batch_size": NoEffect("generation.vllm_cfg.max_num_seqs is the engines' own"),
    "policy.precision": Here(
        "policy.precision", "`float16` is missing", one_of(PRECISIONS, "set policy.precision=bfloat16")
    ),
    "policy.logprob_chunk_size": NoEffect(_SPEED),
    "policy.make_sequence_length_divisible_by": NoEffect("follows from the layout"),
    "policy.offload_optimizer_for_logprob": Here(
        "policy.offload_optimizer_for_logprob",
        "true where engines share the GPUs, as NeMo-RL always does then",
        lambda value, theirs: bool(value) or to.offloads(value, theirs),
    ),
    "policy.sequence_packing.algorithm": Always(
        ("modified_first_fit_decreasing",),
        "samples are packed by modified first fit decreasing; leave it out",
    ),
    "policy.sequence_packing.microbatch_order": NoEffect("the order changes no result but rounding"),
    "policy.sequence_packing.sequence_length_round": NoEffect("packed samples need no rounding"),
    "policy.draft.enabled": Missing(
        "a draft is not trained; engines use one with generation.vllm_kwargs.speculative_config"
    ),
    "policy.draft": NoEffect("a draft is not trained"),
    "policy.router_replay.enabled": "policy.megatron_cfg.router_replay",
    "policy.train_iters": NoEffect("the scheduler counts by itself"),
}

_FSDP: dict[str, Entry] = {
    "policy.dtensor_cfg.enabled": "policy.backend=fsdp",
    "policy.dtensor_cfg.activation_checkpointing": "policy.fsdp_cfg.activation_checkpointing",
    "policy.dtensor_cfg.cpu_offload": "policy.fsdp_cfg.cpu_offload",
    "policy.dtensor_cfg.tensor_parallel_size": "policy.fsdp_cfg.tensor_parallel_size",
    "policy.dtensor_cfg.context_parallel_size": Missing(
        "sequences are divided with policy.backend=megatron alone; set "
        "policy.megatron_cfg.context_parallel_size there",
        (None, 1),
    ),
    "policy.dtensor_cfg.sequence_parallel": NoEffect(_SPEED),
    "policy.dtensor_cfg.custom_parallel_plan": Missing("the plan is that of the model's own classes"),
    "policy.dtensor_cfg._v2": NoEffect("there is one worker"),
    "policy.dtensor_cfg.automodel_kwargs": NoEffect("models are those of transformers"),
    "policy.dtensor_cfg.env_vars": NoEffect("set them in the shell"),
    **_adapters(
        "policy.dtensor_cfg.lora_cfg",
        to.target_modules("policy.dtensor_cfg.lora_cfg"),
        ("match_all_linear", "dropout_position", "lora_A_init", "use_triton"),
    ),
    "policy.optimizer.name": Always(("torch.optim.AdamW",), "the optimizer is AdamW; leave it out"),
    "policy.optimizer.kwargs.lr": "policy.optimizer.lr",
    "policy.optimizer.kwargs.weight_decay": "policy.optimizer.weight_decay",
    "policy.optimizer.kwargs.betas": (
        Here("policy.optimizer.adam_beta1", "the first", item(0)),
        Here("policy.optimizer.adam_beta2", "the second", item(1)),
    ),
    "policy.optimizer.kwargs.eps": "policy.optimizer.adam_eps",
    "policy.optimizer.kwargs.foreach": NoEffect(_SPEED),
    "policy.optimizer.kwargs.fused": NoEffect(_SPEED),
    "policy.scheduler": (
        Here("policy.scheduler.warmup_updates", f"a leading LinearLR; {_UPDATES}", to.warmup),
        Here("policy.scheduler.decay_style", "the last scheduler; ConstantLR is `constant`", to.decay),
    ),
}

_MEGATRON: dict[str, Entry] = {
    "policy.megatron_cfg.enabled": "policy.backend=megatron",
    "policy.megatron_cfg.optimizer.optimizer": Always(("adam",), "the optimizer is AdamW; leave it out"),
    "policy.megatron_cfg.optimizer.lr": "policy.optimizer.lr",
    "policy.megatron_cfg.optimizer.min_lr": Here(
        "policy.scheduler.min_lr", "only with a decay, the only time that it is used", to.min_lr
    ),
    "policy.megatron_cfg.optimizer.weight_decay": "policy.optimizer.weight_decay",
    "policy.megatron_cfg.optimizer.adam_beta1": "policy.optimizer.adam_beta1",
    "policy.megatron_cfg.optimizer.adam_beta2": "policy.optimizer.adam_beta2",
    "policy.megatron_cfg.optimizer.adam_eps": "policy.optimizer.adam_eps",
    "policy.megatron_cfg.optimizer.clip_grad": "policy.max_grad_norm",
    "policy.megatron_cfg.optimizer.use_distributed_optimizer": (
        "policy.megatron_cfg.use_distributed_optimizer"
    ),
    "policy.megatron_cfg.optimizer.optimizer_cpu_offload": Missing(
        "the optimizer's state leaves the GPU between trainings: policy.offload_optimizer_for_logprob=true"
    ),
    "policy.megatron_cfg.optimizer": NoEffect(_SPEED),
    "policy.megatron_cfg.scheduler.lr_warmup_iters": Here(
        "policy.scheduler.warmup_updates", _UPDATES, to.in_updates
    ),
    "policy.megatron_cfg.scheduler.lr_decay_iters": Here(
        "policy.scheduler.decay_updates", f"with a decay; {_UPDATES}", to.decay_updates
    ),
    "policy.megatron_cfg.scheduler.lr_decay_style": Here(
        "policy.scheduler.decay_style",
        "`constant`, `linear` or `cosine`",
        one_of({name: name for name in ("constant", "linear", "cosine")}, "set policy.scheduler.decay_style"),
    ),
    "policy.megatron_cfg.scheduler.lr_warmup_init": NoEffect("a warm-up begins at 0"),
    "policy.megatron_cfg.scheduler.weight_decay_incr_style": Always(
        ("constant",), "the weight decay stays; leave it out"
    ),
    "policy.megatron_cfg.scheduler": NoEffect("the weight decay stays"),
    **_adapters(
        "policy.megatron_cfg.peft",
        to.megatron_targets,
        ("dropout_position", "lora_A_init_method", "lora_B_init_method", "a2a_experimental", "lora_dtype"),
    ),
    "policy.megatron_cfg.expert_tensor_parallel_size": Missing(
        "a mixture's experts are divided by policy.megatron_cfg.expert_model_parallel_size alone", (None, 1)
    ),
    "policy.megatron_cfg.num_layers_in_first_pipeline_stage": Missing(
        "pipeline stages have equally many layers"
    ),
    "policy.megatron_cfg.num_layers_in_last_pipeline_stage": Missing(
        "pipeline stages have equally many layers"
    ),
    "policy.megatron_cfg.freeze_moe_router": Missing(
        "a mixture's routers train; nothing to do for a model without experts"
    ),
    "policy.megatron_cfg.moe_router_load_balancing_type": Always(
        ("none",), "a mixture trains without a loss for balance; leave it out"
    ),
    "policy.megatron_cfg.moe_router_bias_update_rate": Always((0.0,), "routers have no bias updates"),
    "policy.megatron_cfg.mtp_num_layers": Missing(
        "models have no layers that predict further tokens", (None, 0)
    ),
    "policy.megatron_cfg.model_overrides": Missing("change config.json in the model's directory", (None, {})),
    "policy.megatron_cfg.fp8_cfg.enabled": Missing(
        "training stays in policy.precision; generation.vllm_cfg.quantization=fp8 samples in 8 bits"
    ),
    "policy.megatron_cfg.env_vars": NoEffect("set them in the shell"),
    "policy.megatron_cfg.converter_type": NoEffect("follows from the model"),
    "policy.megatron_cfg.recompute_granularity": NoEffect(
        "policy.megatron_cfg.activation_checkpointing recomputes whole layers"
    ),
    **{
        f"policy.megatron_cfg.{name}": NoEffect(_SPEED)
        for name in (
            "checkpoint",
            "use_fused_linear_logprobs",
            "fused_linear_logprobs_chunk_size",
            "force_reconvert_from_hf",
            "empty_unused_memory_level",
            "cuda_graph_impl",
            "cuda_graph_modules",
            "cuda_graph_warmup_steps",
            "fine_grained_activation_offloading",
            "offload_modules",
            "recompute_modules",
            "pipeline_dtype",
            "moe_router_dtype",
            "moe_permute_fusion",
            "apply_rope_fusion",
            "bias_activation_fusion",
            "defer_fp32_logits",
            "moe_per_layer_logging",
            "moe_enable_deepep",
            "moe_token_dispatcher_type",
            "moe_shared_expert_overlap",
            "use_gloo_process_groups",
            "mtp_loss_scaling_factor",
            "mtp_use_repeated_layer",
            "mtp_detach_heads",
            "gradient_accumulation_fusion",
            "use_fused_weighted_squared_relu",
            "distributed_data_parallel_config",
            "fp8_cfg",
        )
    },
}

_GENERATION: dict[str, Entry] = {
    "policy.generation.backend": Always(("vllm",), "vLLM generates; leave it out"),
    "policy.generation.max_new_tokens": Here(
        "generation.max_new_tokens",
        "below policy.max_total_sequence_length: prompts keep data.max_input_seq_length, or a quarter",
        to.max_new_tokens,
    ),
    "policy.generation.temperature": "generation.temperature",
    "policy.generation.top_p": "generation.top_p",
    "policy.generation.top_k": Here("generation.top_k", "", all_tokens),
    "policy.generation.val_temperature": Here(
        "generation.validation.temperature",
        "where it is another one",
        to.only_other_than("policy.generation.temperature"),
    ),
    "policy.generation.val_top_p": Here(
        "generation.validation.top_p",
        "where it is another one",
        to.only_other_than("policy.generation.top_p"),
    ),
    "policy.generation.val_top_k": Here(
        "generation.validation.top_k",
        "where it is another one",
        to.only_other_than("policy.generation.top_k"),
    ),
    "policy.generation.stop_strings": Here(
        "generation.stop_strings", "null is an empty list", lambda value, theirs: value or []
    ),
    "policy.generation.stop_token_ids": Here(
        "generation.stop_token_ids", "null is an empty list", lambda value, theirs: value or []
    ),
    "policy.generation.colocated.enabled": (
        Here(
            "cluster.placement",
            "`colocated`, or `separate`",
            lambda value, theirs: "colocated" if value else "separate",
        ),
        Here("policy.offload_optimizer_for_logprob", "where they share GPUs", to.offloads),
        Here("policy.offload_parameters_between_phases", "where they share GPUs", to.offloads),
    ),
    "policy.generation.colocated.resources.gpus_per_node": Here(
        "generation.num_engines", "see cluster.gpus_per_node", lambda value, theirs: LEFT_OUT
    ),
    "policy.generation.colocated.resources.num_nodes": Here(
        "generation.num_engines", "see cluster.gpus_per_node", lambda value, theirs: LEFT_OUT
    ),
    "policy.generation.vllm_cfg.enforce_eager": "generation.vllm_cfg.enforce_eager",
    "policy.generation.vllm_cfg.gpu_memory_utilization": "generation.vllm_cfg.gpu_memory_utilization",
    "policy.generation.vllm_cfg.max_model_len": Here(
        "policy.max_total_sequence_length", "the policy's own", lambda value, theirs: LEFT_OUT
    ),
    "policy.generation.vllm_cfg.precision": Here(
        "generation.vllm_cfg.quantization",
        "`fp8`, or null for the policy's precision",
        lambda value, theirs: "fp8" if value == "fp8" else None,
    ),
    "policy.generation.vllm_cfg.tensor_parallel_size": "generation.vllm_cfg.tensor_parallel_size",
    "policy.generation.vllm_cfg.pipeline_parallel_size": Missing(
        "an engine is divided by generation.vllm_cfg.tensor_parallel_size alone", (None, 1)
    ),
    "policy.generation.vllm_cfg.expert_parallel_size": Missing(
        "an engine's experts are whole on its GPUs with generation.vllm_kwargs.enable_expert_parallel=true",
        (None, 1),
    ),
    "policy.generation.vllm_cfg.kv_cache_dtype": Missing(
        "set generation.vllm_kwargs.kv_cache_dtype", (None, "auto")
    ),
    "policy.generation.vllm_cfg.logprobs_mode": Always(
        ("processed_logprobs",), "log-probs are those of the distribution that was sampled from"
    ),
    "policy.generation.vllm_cfg": NoEffect("the engine's own affair, or that of a server"),
    "policy.generation.vllm_kwargs": Here(
        "generation.vllm_kwargs", "", lambda value, theirs: dict(value) if value else LEFT_OUT
    ),
    "policy.generation.refit_transport": NoEffect("generation.weight_transport=auto chooses it"),
    "policy.generation.refit_cfg": NoEffect("generation.weight_transport=auto chooses it"),
    "policy.generation.real_quant_export_cpu_offload": NoEffect(_SPEED),
    "policy.generation.mcore_generation_config": NoEffect("vLLM generates"),
    "policy.generation.port_range_low": NoEffect(_SERVED),
    "policy.generation.port_range_high": NoEffect(_SERVED),
}

_DATA: dict[str, Entry] = {
    "data.max_input_seq_length": Here("data.max_input_seq_length", "below the whole length", to.max_input),
    "data.num_workers": NoEffect("problems are read without workers"),
    "data.use_multiple_dataloader": Missing("sources are mixed by data.train[].weight"),
    "data.num_prompts_per_dataloader": NoEffect("sources are mixed by data.train[].weight"),
    "data.custom_dataloader": Missing("sources are mixed by data.train[].weight"),
    "data.add_system_prompt": NoEffect("data.default.system_prompt says it"),
    "data.train": Here(
        "data.train", "data sets that NeMo-RL knows by name get their place on the hub", sources
    ),
    "data.validation": Here("data.validation", "as data.train; null is missing", source_list),
    "data.default.env_name": Here("data.default.env", "a key of env", environment),
    "data.default.prompt_file": Here(
        "data.default.prompt_template", "the file's text, with `{prompt}` for `{}`", prompt_text("{prompt}")
    ),
    "data.default.system_prompt_file": Here(
        "data.default.system_prompt", "the file's text", prompt_text(None)
    ),
    "data.default.input_key": "data.default.prompt_key",
    "data.default.output_key": "data.default.answer_key",
    "data.default.dataset_name": Here("data.default.kind", "see data.train", lambda value, theirs: LEFT_OUT),
    "data.default.processor": NoEffect("the environment judges, whatever the source"),
    "data.dataset_name": "data.train.path",
    "data.input_key": "data.train.prompt_key",
    "data.output_key": "data.train.answer_key",
    "data.prompt_file": "data.default.prompt_template",
    "data.system_prompt_file": "data.default.system_prompt",
    "data.train_data_path": "data.train.path",
    "data.train_split": "data.train.split",
    "data.val_data_path": "data.validation.path",
    "data.val_split": "data.validation.split",
    "env.math.num_workers": "env.math.num_actors",
    "env.math.math_verify_impl": Missing(
        "env.math compares by math-verify; for another comparison add `- env@env.NAME: KIND` to the defaults",
        (None, "hf_math_verify"),
    ),
}

_REST: dict[str, Entry] = {
    "logger.wandb_enabled": Here(
        "logger.wandb.mode",
        "`online`, or `disabled`",
        lambda value, theirs: "online" if value else "disabled",
    ),
    "logger.tensorboard_enabled": "logger.tensorboard.enabled",
    "logger.mlflow_enabled": "logger.mlflow.enabled",
    "logger.swanlab_enabled": Missing("use logger.wandb, logger.mlflow or logger.tensorboard"),
    "logger.swanlab": NoEffect("there is no SwanLab here"),
    "logger.monitor_gpus": "logger.wandb.system_metrics",
    "logger.gpu_monitoring": NoEffect("W&B measures at its own pace"),
    "logger.num_val_samples_to_print": "logger.num_sample_answers",
    "logger.wandb.log_nemo_gym_full_result_tables": NoEffect("rollout.dump_period writes conversations"),
    "logger.tensorboard.log_dir": NoEffect("event files are in the run's directory"),
    "logger.mlflow.run_name": NoEffect("logger.run_name names the run"),
    "cluster.gpus_per_node": (
        Here("cluster.gpus_per_node"),
        Here("policy.data_parallel_size", "GPUs that train / GPUs of a replica", to.data_parallel_size),
        Here("generation.num_engines", "GPUs that generate / GPUs of an engine", to.num_engines),
    ),
    "cluster.num_nodes": (
        Here("cluster.num_nodes"),
        Here("cluster.address", "`auto` for several nodes", to.address),
    ),
    "cluster.segment_size": Missing("nodes are not ordered by their links; order them in Slurm"),
    "cluster.master_port_range_low": NoEffect("free ports are taken"),
    "cluster.master_port_range_high": NoEffect("free ports are taken"),
    "data_plane.enabled": NoEffect("every run has a data plane"),
    "data_plane.impl": NoEffect("TransferQueue is the data plane"),
    "data_plane.storage_capacity": NoEffect("data_plane.capacity_gib limits bytes instead"),
    "data_plane.claim_meta_poll_interval_s": NoEffect("nothing polls"),
    "data_plane.global_segment_size": Here(
        "data_plane.mooncake_cfg.segment_gib",
        "bytes / 2^30, with mooncake_cpu",
        to.only_mooncake(to.gib),
    ),
    "data_plane.local_buffer_size": Here(
        "data_plane.mooncake_cfg.buffer_mib",
        "bytes / 2^20, with mooncake_cpu",
        to.only_mooncake(to.mib),
    ),
    "data_plane.observability": NoEffect("data_plane.log_operations records metrics"),
    "on_policy_distillation": Missing(
        "set loss_fn.kind=distillation and teacher=default, see docs/losses.md"
    ),
    "distillation": Missing("set loss_fn.kind=distillation and teacher=default, see docs/losses.md"),
}

_PPO_SAME = (
    "num_prompts_per_step", "num_generations_per_prompt", "max_num_steps", "val_at_start", "val_at_end",
    "max_val_samples", "seed", "overlong_filtering", "use_dynamic_sampling",
    "dynamic_sampling_max_gen_batches", "seq_logprob_error_threshold",
)  # fmt: skip
_PPO_MAPPED = (
    "max_rollout_turns", "max_num_epochs", "val_period", "val_batch_size", "batch_multiplier",
    "skip_reference_policy_logprobs_calculation",
)  # fmt: skip
_SHAPING = (
    "enabled", "overlong_buffer_length", "overlong_buffer_penalty", "max_response_length",
    "stop_properly_penalty_coef",
)  # fmt: skip
_SCALING = ("enabled", "source_min", "source_max", "target_min", "target_max")

_PPO: dict[str, Entry] = {
    **{f"ppo.{name}": f"grpo.{name}" for name in _PPO_SAME},
    **{f"ppo.{name}": _GRPO[f"grpo.{name}"] for name in _PPO_MAPPED},
    **{f"ppo.reward_shaping.{name}": f"grpo.reward_shaping.{name}" for name in _SHAPING},
    **{f"ppo.reward_scaling.{name}": f"grpo.reward_scaling.{name}" for name in _SCALING},
    "ppo.ppo_epochs": "grpo.num_epochs_per_rollout",
    "ppo.policy_training_start_step": "value.warmup_steps",
    "ppo.adv_estimator.name": Here("grpo.adv_estimator.name", "", to.estimator),
    "ppo.adv_estimator.gae_lambda": "value.gae_lambda",
    "ppo.adv_estimator.gae_gamma": "value.gae_gamma",
    "ppo.adv_estimator.normalize_advantages": Always((True,), "advantages by a critic are whitened"),
    "ppo.adv_estimator.gae_lambda_value": Missing("policy and critic have one value.gae_lambda"),
    "ppo.adv_estimator.gae_lambda_policy": Missing("policy and critic have one value.gae_lambda"),
    "ppo.adv_estimator.length_adaptive_alpha": Missing("value.gae_lambda is a constant", (None, 0, 0.0)),
    **_overlap("ppo.async_ppo"),
    "value_loss_fn.cliprange": "value.clip_range",
    "value_loss_fn.scale": Missing("the critic has an optimizer of its own; set value.optimizer.lr"),
    "value.reward_model_cfg": NoEffect("a critic's model has one number per token as output"),
}


def _of_value(key: str, entry: Entry) -> tuple[str, Entry]:
    """Return an entry of the policy for the critic."""
    theirs = key.replace("policy.", "value.", 1)
    if ".lora_cfg" in key or ".peft" in key:
        return theirs, NoEffect("a critic has no adapters")
    if key.startswith("policy.tokenizer"):
        return theirs, NoEffect("a critic has the policy's tokenizer")
    if key.startswith("policy.router_replay"):
        return theirs, NoEffect(CRITICS_ROUTERS)
    if isinstance(entry, str):
        return theirs, entry.replace("policy.", "value.", 1)
    if isinstance(entry, NoEffect | Missing | Always):
        return theirs, entry
    changed = tuple(
        Here(each.key.replace("policy.", "value.", 1), each.how, _in_the_place_of_policy(each))
        for each in ((entry,) if isinstance(entry, Here) else entry)
    )
    return theirs, changed


def _in_the_place_of_policy(entry: Here) -> Any:
    def convert(value: Any, theirs: Theirs) -> Any:
        tree = {**theirs.tree, "policy": {**theirs("policy", {}), **theirs("value", {})}}
        return entry.convert(value, Theirs(tree, theirs.texts))

    return convert


_TRAINING = {**_POLICY, **_FSDP, **_MEGATRON}
_VALUE = dict(_of_value(key, entry) for key, entry in _TRAINING.items())

_FSDP_KEYS = ("dtensor_cfg", "optimizer", "scheduler")
NEMO_RL = Framework(
    name="NeMo-RL",
    keys={
        **_GRPO, **_PPO, **_LOSS, **_CHECKPOINTING, **_POLICY, **_FSDP, **_MEGATRON, **_GENERATION, **_VALUE,
        **_DATA, **_REST,
    },
    switches=(
        *(
            Switch(f"{role}.{name}", f"{role}.dtensor_cfg.enabled")
            for role in ("policy", "value")
            for name in _FSDP_KEYS
        ),
        *(
            Switch(f"{role}.{name}", f"{role}.{name}.enabled")
            for role in ("policy", "value")
            for name in ("megatron_cfg", "sequence_packing", "dynamic_batching")
        ),
        Switch("policy.dtensor_cfg.lora_cfg", "policy.dtensor_cfg.lora_cfg.enabled"),
        Switch("policy.megatron_cfg.peft", "policy.megatron_cfg.peft.enabled"),
        Switch("grpo.async_grpo", "grpo.async_grpo.enabled"),
        Switch("ppo.async_ppo", "ppo.async_ppo.enabled"),
        Switch("grpo.reward_scaling", "grpo.reward_scaling.enabled"),
        Switch("grpo.reward_shaping", "grpo.reward_shaping.enabled"),
        Switch("ppo.reward_scaling", "ppo.reward_scaling.enabled"),
        Switch("ppo.reward_shaping", "ppo.reward_shaping.enabled"),
        Switch("logger.mlflow", "logger.mlflow_enabled"),
        Switch("value", "ppo.adv_estimator.name", ("gae",)),
    ),
    habits={
        "grpo.mix_groups_in_updates": (False, "an update takes neighbouring samples"),
        "grpo.skip_idle_samples": (False, "every sample gets a training pass"),
    },
    shares_names=True,
    rest={
        "env.math": NoEffect("env.math is the environment math_verify"),
        "env": Missing(
            "add `- env@env.NAME: KIND` to the defaults and name it in data.default.env, see "
            "docs/environments.md"
        ),
    },
)  # fmt: skip
