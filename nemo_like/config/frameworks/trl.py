"""What the fields of TRL's ``GRPOConfig``, ``PPOConfig`` and ``ModelConfig`` are here."""

from __future__ import annotations

from nemo_like.config.frameworks.entries import Always, Entry, Framework, Here, Missing, NoEffect

_SERVER = "engines are the run's own; none is a server"
_TRANSFORMERS = "vLLM generates"
_ADAPTIVE = "the coefficient stays; set loss_fn.entropy_coef"
_STEPS = "of GRPO, not of the optimizer"
_SAMPLES = (
    "x processes x gradient_accumulation_steps / steps_per_generation is policy.train_global_batch_size"
)

_GENERATION: dict[str, Entry] = {
    "num_generations": "grpo.num_generations_per_prompt",
    "num_generations_eval": "grpo.num_val_generations_per_prompt",
    "generation_batch_size": Here("grpo.num_prompts_per_step", "samples of a step: / num_generations"),
    "steps_per_generation": Here(
        "policy.train_global_batch_size", "updates of a step: samples of a step / steps_per_generation"
    ),
    "max_completion_length": "generation.max_new_tokens",
    "max_prompt_length": "data.max_input_seq_length",
    "vllm_max_model_length": "policy.max_total_sequence_length",
    "temperature": "generation.temperature",
    "top_p": "generation.top_p",
    "top_k": Here("generation.top_k", "0 is null"),
    "min_p": Here("generation.min_p", "null is 0"),
    "repetition_penalty": Missing("log-probs are those of the model's own distribution"),
    "generation_kwargs": Missing("sampling has the keys of generation"),
    "use_vllm": Always((True,), _TRANSFORMERS),
    "vllm_mode": Here("cluster.placement", "`colocate` is `colocated`, `server` is `separate`"),
    "vllm_enable_sleep_mode": "cluster.placement=colocated",
    "vllm_gpu_memory_utilization": "generation.vllm_cfg.gpu_memory_utilization",
    "vllm_tensor_parallel_size": "generation.vllm_cfg.tensor_parallel_size",
    "vllm_model_impl": NoEffect("vLLM's own models"),
    "vllm_structured_outputs_regex": Missing("reward the form instead, by the environment regex"),
    "vllm_server_base_url": NoEffect(_SERVER),
    "vllm_server_host": NoEffect(_SERVER),
    "vllm_server_port": NoEffect(_SERVER),
    "vllm_server_timeout": NoEffect(_SERVER),
    "vllm_group_port": NoEffect(_SERVER),
    "cache_implementation": NoEffect(_TRANSFORMERS),
    "use_transformers_continuous_batching": NoEffect(_TRANSFORMERS),
    "max_tool_calling_iterations": Here("env.<name>.max_turns", "calls of tools are turns; + 1"),
    "chat_template_kwargs": Missing("write them into a template of your own, data.chat_template"),
}

_LOSS: dict[str, Entry] = {
    "beta": "loss_fn.reference_policy_kl_penalty",
    "kl_coef": "loss_fn.reference_policy_kl_penalty",
    "epsilon": (Here("loss_fn.ratio_clip_min"), Here("loss_fn.ratio_clip_max", "without epsilon_high")),
    "epsilon_high": "loss_fn.ratio_clip_max",
    "cliprange": (Here("loss_fn.ratio_clip_min"), Here("loss_fn.ratio_clip_max")),
    "delta": "loss_fn.ratio_clip_c",
    "importance_sampling_level": Here(
        "loss_fn.sequence_level_importance_ratios", "`sequence` is true, with token_level_loss=false"
    ),
    "loss_type": Here(
        "loss_fn.token_level_loss",
        "`dapo` is true; `grpo` false; `dr_grpo` false with loss_fn.sequence_length_normalizer; `cispo` "
        "loss_fn.use_cispo; `sapo` loss_fn.kind=sapo; on `bnpo` see docs/losses.md",
    ),
    "scale_rewards": Here("grpo.normalize_rewards", "`group` is true, `none` false; `batch` is missing"),
    "multi_objective_aggregation": Here(
        "grpo.adv_estimator.name", "`normalize_then_sum` is `gdpo`; `sum_then_normalize` is `grpo`"
    ),
    "reward_weights": Here("grpo.adv_estimator.reward_weights", "by the components' names"),
    "mask_truncated_completions": "grpo.overlong_filtering",
    "num_iterations": "grpo.num_epochs_per_rollout",
    "num_ppo_epochs": "grpo.num_epochs_per_rollout",
    "entropy_coef": "loss_fn.entropy_coef",
    "use_adaptive_entropy": Missing(_ADAPTIVE),
    "entropy_coef_min": NoEffect(_ADAPTIVE),
    "entropy_coef_max": NoEffect(_ADAPTIVE),
    "entropy_coef_delta": NoEffect(_ADAPTIVE),
    "entropy_target": NoEffect(_ADAPTIVE),
    "top_entropy_quantile": Missing("write a loss that reads the entropy, docs/columns.md"),
    "sapo_temperature_neg": "loss_fn.arguments.tau_neg",
    "sapo_temperature_pos": "loss_fn.arguments.tau_pos",
    "vllm_importance_sampling_correction": "loss_fn.use_importance_sampling_correction",
    "vllm_importance_sampling_mode": Here(
        "loss_fn.truncated_importance_sampling_type",
        "`token_truncate` is `tis`, `token_mask` `icepop`; on `sequence_*` see docs/losses.md",
    ),
    "vllm_importance_sampling_clip_max": "loss_fn.truncated_importance_sampling_ratio",
    "vllm_importance_sampling_clip_min": "loss_fn.truncated_importance_sampling_ratio_min",
    "vllm_importance_sampling_cap": "loss_fn.truncated_importance_sampling_ratio",
    "off_policy_mask_threshold": Missing(
        "grpo.seq_logprob_error_threshold masks samples, by another measure"
    ),
    "use_bias_correction_kl": NoEffect("the KL has the gradient of the score function, see docs/losses.md"),
    "sync_ref_model": Missing("the reference policy is the model that the run began with"),
    "ref_model_mixup_alpha": NoEffect("goes with sync_ref_model"),
    "ref_model_sync_steps": NoEffect("goes with sync_ref_model"),
    "cliprange_value": "value.clip_range",
    "gamma": "value.gae_gamma",
    "lam": "value.gae_lambda",
    "value_model": "value.model_name",
    "vf_coef": Here("value.optimizer.lr", "the critic has its own optimizer: x vf_coef"),
}

_TRAINING: dict[str, Entry] = {
    "model_name_or_path": Here("policy.model_name", "a directory, not a name on the hub"),
    "model_init_kwargs": NoEffect("policy.precision and the backend say it"),
    "trust_remote_code": Missing("models are those of transformers and vLLM"),
    "disable_dropout": Always((True,), "the model has no dropout"),
    "router_aux_loss_coef": Always((0.0,), "a mixture trains without a loss for balance"),
    "per_device_train_batch_size": Here("policy.train_micro_batch_size", _SAMPLES),
    "gradient_accumulation_steps": Here("policy.train_global_batch_size", _SAMPLES),
    "per_device_eval_batch_size": NoEffect("engines get all problems of a validation at once"),
    "learning_rate": "policy.optimizer.lr",
    "weight_decay": "policy.optimizer.weight_decay",
    "adam_beta1": "policy.optimizer.adam_beta1",
    "adam_beta2": "policy.optimizer.adam_beta2",
    "adam_epsilon": "policy.optimizer.adam_eps",
    "max_grad_norm": "policy.max_grad_norm",
    "lr_scheduler_type": Here("policy.scheduler.decay_style", "`constant`, `linear` or `cosine`"),
    "warmup_steps": "policy.scheduler.warmup_updates",
    "warmup_ratio": Here("policy.scheduler.warmup_updates", "x updates of the run"),
    "optim": Always(("adamw_torch", "adamw_torch_fused"), "the optimizer is AdamW"),
    "bf16": "policy.precision=bfloat16",
    "fp16": Missing("set policy.precision=bfloat16"),
    "gradient_checkpointing": "policy.fsdp_cfg.activation_checkpointing",
    "use_peft": "policy.lora.enabled",
    "lora_alpha": "policy.lora.alpha",
    "lora_dropout": "policy.lora.dropout",
    "lora_r": "policy.lora.rank",
    "lora_target_modules": "policy.lora.target_modules",
    "max_steps": Here("grpo.max_num_steps", "optimizer updates: / updates of a step"),
    "num_train_epochs": Here("grpo.max_num_steps", "x problems / grpo.num_prompts_per_step"),
    "shuffle_dataset": "data.shuffle",
    "remove_unused_columns": NoEffect("all fields of a record reach the environment"),
    "pad_to_multiple_of": NoEffect("micro-batches are packed, or padded as the layout asks"),
}

_FILES: dict[str, Entry] = {
    "output_dir": "logger.log_dir",
    "run_name": "logger.run_name",
    "report_to": Here("logger.wandb.mode", "`wandb` is `online`; logger.mlflow and logger.tensorboard"),
    "log_completions": Here("rollout.dump_period", "true is 1"),
    "log_completions_hub_repo": Missing("conversations are in RUN_DIR/rollouts"),
    "num_completions_to_print": "logger.num_sample_answers",
    "log_unique_prompts": NoEffect("conversations are in RUN_DIR/rollouts"),
    "eval_steps": Here("grpo.val_period", _STEPS),
    "save_steps": Here("checkpointing.save_period", _STEPS),
    "save_total_limit": Here("checkpointing.keep_top_k", "besides the latest: - 1"),
}

TRL = Framework(name="TRL", keys={**_GENERATION, **_LOSS, **_TRAINING, **_FILES})
