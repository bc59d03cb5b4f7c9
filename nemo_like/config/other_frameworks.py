"""What other frameworks call the keys of this one, for those who come from them. Standard library only.

``NAMES`` has, by framework, its name and what to write here: a key, or a key with the value that means the
same. An earlier version of this framework counts as another. The names of NeMo-RL and verl are full keys;
those of TRL (``GRPOConfig`` and ``PPOConfig``) and OpenRLHF (arguments) have no groups.
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import NamedTuple

# Of 1, for equal spelling.
_CLOSE = 0.85

NAMES: dict[str, dict[str, str]] = {
    "an earlier version": {"cluster.num_gpus": "cluster.gpus_per_node"},
    "NeMo-RL": {
        "data.dataset_name": "data.train.path",
        "data.input_key": "data.train.prompt_key",
        "data.output_key": "data.train.answer_key",
        "data.prompt_file": "data.default.prompt_template",
        "data.system_prompt_file": "data.default.system_prompt",
        "data.train_data_path": "data.train.path",
        "data.train_split": "data.train.split",
        "data.val_data_path": "data.validation.path",
        "data.val_split": "data.validation.split",
        "grpo.max_rollout_turns": "env.<name>.max_turns",
        "logger.mlflow_enabled": "logger.mlflow.enabled",
        "logger.num_val_samples_to_print": "logger.num_sample_answers",
        "logger.tensorboard_enabled": "logger.tensorboard.enabled",
        "logger.wandb_enabled": "logger.wandb.mode",
        "policy.dtensor_cfg.activation_checkpointing": "policy.fsdp_cfg.activation_checkpointing",
        "policy.dtensor_cfg.cpu_offload": "policy.fsdp_cfg.cpu_offload",
        "policy.dtensor_cfg.enabled": "policy.backend=fsdp",
        "policy.dtensor_cfg.lora_cfg.alpha": "policy.lora.alpha",
        "policy.dtensor_cfg.lora_cfg.dim": "policy.lora.rank",
        "policy.dtensor_cfg.lora_cfg.dropout": "policy.lora.dropout",
        "policy.dtensor_cfg.lora_cfg.enabled": "policy.lora.enabled",
        "policy.dtensor_cfg.lora_cfg.target_modules": "policy.lora.target_modules",
        "policy.dtensor_cfg.tensor_parallel_size": "policy.fsdp_cfg.tensor_parallel_size",
        "policy.generation.colocated.enabled": "cluster.placement",
        "policy.generation.max_new_tokens": "generation.max_new_tokens",
        "policy.generation.stop_strings": "generation.stop_strings",
        "policy.generation.temperature": "generation.temperature",
        "policy.generation.top_k": "generation.top_k",
        "policy.generation.top_p": "generation.top_p",
        "policy.generation.vllm_cfg.enforce_eager": "generation.vllm_cfg.enforce_eager",
        "policy.generation.vllm_cfg.gpu_memory_utilization": "generation.vllm_cfg.gpu_memory_utilization",
        "policy.generation.vllm_cfg.max_model_len": "policy.max_total_sequence_length",
        "policy.generation.vllm_cfg.precision": "generation.vllm_cfg.quantization",
        "policy.generation.vllm_cfg.tensor_parallel_size": "generation.vllm_cfg.tensor_parallel_size",
        "policy.megatron_cfg.enabled": "policy.backend=megatron",
        "policy.megatron_cfg.optimizer.adam_beta1": "policy.optimizer.adam_beta1",
        "policy.megatron_cfg.optimizer.adam_beta2": "policy.optimizer.adam_beta2",
        "policy.megatron_cfg.optimizer.adam_eps": "policy.optimizer.adam_eps",
        "policy.megatron_cfg.optimizer.clip_grad": "policy.max_grad_norm",
        "policy.megatron_cfg.optimizer.lr": "policy.optimizer.lr",
        "policy.megatron_cfg.optimizer.min_lr": "policy.scheduler.min_lr",
        "policy.megatron_cfg.optimizer.use_distributed_optimizer": (
            "policy.megatron_cfg.use_distributed_optimizer"
        ),
        "policy.megatron_cfg.optimizer.weight_decay": "policy.optimizer.weight_decay",
        "policy.megatron_cfg.peft.alpha": "policy.lora.alpha",
        "policy.megatron_cfg.peft.dim": "policy.lora.rank",
        "policy.megatron_cfg.peft.dropout": "policy.lora.dropout",
        "policy.megatron_cfg.peft.enabled": "policy.lora.enabled",
        "policy.megatron_cfg.peft.target_modules": "policy.lora.target_modules",
        "policy.megatron_cfg.scheduler.lr_decay_iters": "policy.scheduler.decay_updates",
        "policy.megatron_cfg.scheduler.lr_decay_style": "policy.scheduler.decay_style",
        "policy.megatron_cfg.scheduler.lr_warmup_iters": "policy.scheduler.warmup_updates",
        "policy.optimizer.kwargs.betas": "policy.optimizer.adam_beta1",
        "policy.optimizer.kwargs.eps": "policy.optimizer.adam_eps",
        "policy.optimizer.kwargs.lr": "policy.optimizer.lr",
        "policy.optimizer.kwargs.weight_decay": "policy.optimizer.weight_decay",
    },
    "verl": {
        "actor_rollout_ref.actor.clip_ratio_c": "loss_fn.ratio_clip_c",
        "actor_rollout_ref.actor.clip_ratio_high": "loss_fn.ratio_clip_max",
        "actor_rollout_ref.actor.clip_ratio_low": "loss_fn.ratio_clip_min",
        "actor_rollout_ref.actor.entropy_coeff": "loss_fn.entropy_coef",
        "actor_rollout_ref.actor.grad_clip": "policy.max_grad_norm",
        "actor_rollout_ref.actor.kl_loss_coef": "loss_fn.reference_policy_kl_penalty",
        "actor_rollout_ref.actor.kl_loss_type": "loss_fn.reference_policy_kl_type",
        "actor_rollout_ref.actor.loss_agg_mode": "loss_fn.token_level_loss",
        "actor_rollout_ref.actor.megatron.context_parallel_size": (
            "policy.megatron_cfg.context_parallel_size"
        ),
        "actor_rollout_ref.actor.megatron.expert_model_parallel_size": (
            "policy.megatron_cfg.expert_model_parallel_size"
        ),
        "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size": (
            "policy.megatron_cfg.pipeline_model_parallel_size"
        ),
        "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": (
            "policy.megatron_cfg.tensor_model_parallel_size"
        ),
        "actor_rollout_ref.actor.optim.lr": "policy.optimizer.lr",
        "actor_rollout_ref.actor.optim.lr_warmup_steps": "policy.scheduler.warmup_updates",
        "actor_rollout_ref.actor.optim.weight_decay": "policy.optimizer.weight_decay",
        "actor_rollout_ref.actor.policy_loss.loss_mode": "loss_fn.kind",
        "actor_rollout_ref.actor.ppo_epochs": "grpo.num_epochs_per_rollout",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "policy.sequence_packing.train_mb_tokens",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "policy.train_micro_batch_size",
        "actor_rollout_ref.actor.ppo_mini_batch_size": "policy.train_global_batch_size",
        "actor_rollout_ref.actor.strategy": "policy.backend",
        "actor_rollout_ref.actor.tau_neg": "loss_fn.arguments",
        "actor_rollout_ref.actor.tau_pos": "loss_fn.arguments",
        "actor_rollout_ref.actor.use_dynamic_bsz": "policy.sequence_packing.enabled",
        "actor_rollout_ref.actor.use_kl_loss": "loss_fn.reference_policy_kl_penalty",
        "actor_rollout_ref.model.enable_gradient_checkpointing": "policy.fsdp_cfg.activation_checkpointing",
        "actor_rollout_ref.model.lora_alpha": "policy.lora.alpha",
        "actor_rollout_ref.model.lora_rank": "policy.lora.rank",
        "actor_rollout_ref.model.path": "policy.model_name",
        "actor_rollout_ref.model.target_modules": "policy.lora.target_modules",
        "actor_rollout_ref.model.use_remove_padding": "policy.sequence_packing.enabled",
        "actor_rollout_ref.rollout.enforce_eager": "generation.vllm_cfg.enforce_eager",
        "actor_rollout_ref.rollout.gpu_memory_utilization": "generation.vllm_cfg.gpu_memory_utilization",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": "policy.logprob_batch_size",
        "actor_rollout_ref.rollout.max_num_seqs": "generation.vllm_cfg.max_num_seqs",
        "actor_rollout_ref.rollout.n": "grpo.num_generations_per_prompt",
        "actor_rollout_ref.rollout.temperature": "generation.temperature",
        "actor_rollout_ref.rollout.tensor_model_parallel_size": "generation.vllm_cfg.tensor_parallel_size",
        "actor_rollout_ref.rollout.top_k": "generation.top_k",
        "actor_rollout_ref.rollout.top_p": "generation.top_p",
        "actor_rollout_ref.rollout.val_kwargs.n": "grpo.num_val_generations_per_prompt",
        "actor_rollout_ref.rollout.val_kwargs.temperature": "generation.validation.temperature",
        "algorithm.adv_estimator": "grpo.adv_estimator.name",
        "algorithm.filter_groups.enable": "grpo.use_dynamic_sampling",
        "algorithm.filter_groups.max_num_gen_batches": "grpo.dynamic_sampling_max_gen_batches",
        "algorithm.gamma": "value.gae_gamma",
        "algorithm.kl_ctrl.kl_coef": "loss_fn.reference_policy_kl_penalty",
        "algorithm.lam": "value.gae_lambda",
        "algorithm.norm_adv_by_std_in_grpo": "grpo.normalize_rewards",
        "algorithm.use_kl_in_reward": "loss_fn.use_kl_in_reward",
        "critic.cliprange_value": "value.clip_range",
        "critic.grad_clip": "value.max_grad_norm",
        "critic.megatron.context_parallel_size": "value.megatron_cfg.context_parallel_size",
        "critic.megatron.expert_model_parallel_size": "value.megatron_cfg.expert_model_parallel_size",
        "critic.megatron.pipeline_model_parallel_size": "value.megatron_cfg.pipeline_model_parallel_size",
        "critic.megatron.tensor_model_parallel_size": "value.megatron_cfg.tensor_model_parallel_size",
        "critic.model.enable_gradient_checkpointing": "value.fsdp_cfg.activation_checkpointing",
        "critic.model.path": "value.model_name",
        "critic.model.use_remove_padding": "value.sequence_packing.enabled",
        "critic.optim.lr": "value.optimizer.lr",
        "critic.optim.lr_warmup_steps": "value.scheduler.warmup_updates",
        "critic.optim.weight_decay": "value.optimizer.weight_decay",
        "critic.ppo_epochs": "value.num_epochs_per_rollout",
        "critic.ppo_max_token_len_per_gpu": "value.sequence_packing.train_mb_tokens",
        "critic.ppo_micro_batch_size_per_gpu": "value.train_micro_batch_size",
        "critic.ppo_mini_batch_size": "value.train_global_batch_size",
        "critic.strategy": "value.backend",
        "data.max_prompt_length": "data.max_input_seq_length",
        "data.max_response_length": "generation.max_new_tokens",
        "data.prompt_key": "data.train.prompt_key",
        "data.train_batch_size": "grpo.num_prompts_per_step",
        "data.train_files": "data.train.path",
        "data.val_files": "data.validation.path",
        "trainer.critic_warmup": "value.warmup_steps",
        "trainer.default_local_dir": "checkpointing.checkpoint_dir",
        "trainer.experiment_name": "logger.run_name",
        "trainer.logger": "logger.wandb.mode",
        "trainer.n_gpus_per_node": "cluster.gpus_per_node",
        "trainer.nnodes": "cluster.num_nodes",
        "trainer.project_name": "logger.wandb.project",
        "trainer.resume_mode": "checkpointing.resume_if_exists",
        "trainer.save_freq": "checkpointing.save_period",
        "trainer.test_freq": "grpo.val_period",
        "trainer.total_training_steps": "grpo.max_num_steps",
        "trainer.val_before_train": "grpo.val_at_start",
    },
    "TRL": {
        "adam_beta1": "policy.optimizer.adam_beta1",
        "adam_beta2": "policy.optimizer.adam_beta2",
        "adam_epsilon": "policy.optimizer.adam_eps",
        "beta": "loss_fn.reference_policy_kl_penalty",
        "bf16": "policy.precision=bfloat16",
        "cliprange": "loss_fn.ratio_clip_min",
        "cliprange_value": "value.clip_range",
        "delta": "loss_fn.ratio_clip_c",
        "epsilon": "loss_fn.ratio_clip_min",
        "epsilon_high": "loss_fn.ratio_clip_max",
        "eval_steps": "grpo.val_period",
        "gamma": "value.gae_gamma",
        "gradient_checkpointing": "policy.fsdp_cfg.activation_checkpointing",
        "importance_sampling_level": "loss_fn.sequence_level_importance_ratios",
        "kl_coef": "loss_fn.reference_policy_kl_penalty",
        "lam": "value.gae_lambda",
        "learning_rate": "policy.optimizer.lr",
        "log_completions": "rollout.dump_period",
        "lora_alpha": "policy.lora.alpha",
        "lora_dropout": "policy.lora.dropout",
        "lora_r": "policy.lora.rank",
        "lora_target_modules": "policy.lora.target_modules",
        "loss_type": "loss_fn.token_level_loss",
        "lr_scheduler_type": "policy.scheduler.decay_style",
        "mask_truncated_completions": "grpo.overlong_filtering",
        "max_completion_length": "generation.max_new_tokens",
        "max_prompt_length": "data.max_input_seq_length",
        "max_steps": "grpo.max_num_steps",
        "model_name_or_path": "policy.model_name",
        "num_completions_to_print": "logger.num_sample_answers",
        "num_generations": "grpo.num_generations_per_prompt",
        "num_generations_eval": "grpo.num_val_generations_per_prompt",
        "num_iterations": "grpo.num_epochs_per_rollout",
        "num_ppo_epochs": "grpo.num_epochs_per_rollout",
        "output_dir": "logger.log_dir",
        "per_device_train_batch_size": "policy.train_micro_batch_size",
        "report_to": "logger.wandb.mode",
        "reward_weights": "grpo.adv_estimator.reward_weights",
        "run_name": "logger.run_name",
        "sapo_temperature_neg": "loss_fn.arguments",
        "sapo_temperature_pos": "loss_fn.arguments",
        "save_steps": "checkpointing.save_period",
        "save_total_limit": "checkpointing.keep_top_k",
        "scale_rewards": "grpo.normalize_rewards",
        "use_peft": "policy.lora.enabled",
        "value_model": "value.model_name",
        "vf_coef": "value.optimizer.lr",
        "vllm_gpu_memory_utilization": "generation.vllm_cfg.gpu_memory_utilization",
        "vllm_importance_sampling_correction": "loss_fn.use_importance_sampling_correction",
        "vllm_tensor_parallel_size": "generation.vllm_cfg.tensor_parallel_size",
        "warmup_steps": "policy.scheduler.warmup_updates",
    },
    "OpenRLHF": {
        "actor_learning_rate": "policy.optimizer.lr",
        "advantage_estimator": "grpo.adv_estimator.name",
        "colocate_all_models": "cluster.placement=colocated",
        "critic_learning_rate": "value.optimizer.lr",
        "critic_pretrain": "value.model_name",
        "dynamic_filtering": "grpo.use_dynamic_sampling",
        "eps_clip": "loss_fn.ratio_clip_min",
        "eps_clip_low_high": "loss_fn.ratio_clip_max",
        "freezing_actor_steps": "value.warmup_steps",
        "generate_max_len": "generation.max_new_tokens",
        "init_kl_coef": "loss_fn.reference_policy_kl_penalty",
        "kl_estimator": "loss_fn.reference_policy_kl_type",
        "lambd": "value.gae_lambda",
        "lora_alpha": "policy.lora.alpha",
        "lora_rank": "policy.lora.rank",
        "max_epochs": "grpo.num_epochs_per_rollout",
        "max_norm": "policy.max_grad_norm",
        "micro_train_batch_size": "policy.train_micro_batch_size",
        "n_samples_per_prompt": "grpo.num_generations_per_prompt",
        "packing_samples": "policy.sequence_packing.enabled",
        "pretrain": "policy.model_name",
        "prompt_data": "data.train.path",
        "prompt_max_len": "data.max_input_seq_length",
        "rollout_batch_size": "grpo.num_prompts_per_step",
        "save_path": "logger.log_dir",
        "train_batch_size": "policy.train_global_batch_size",
        "use_kl_loss": "loss_fn.reference_policy_kl_penalty",
        "value_clip": "value.clip_range",
        "vllm_enable_sleep": "cluster.placement=colocated",
        "vllm_num_engines": "generation.num_engines",
        "wandb_project": "logger.wandb.project",
    },
}


class KnownName(NamedTuple):
    """What a name of another framework is here."""

    framework: str
    name: str
    here: str  # a key, or key=value


def known_name(key: str) -> KnownName | None:
    """Return what ``key`` means to another framework: as it stands, or by its last part where that is a name
    without groups; None when none has such a name."""
    leaf = key.rpartition(".")[2]
    for name in (key, leaf):
        for framework, names in NAMES.items():
            if name in names:
                return KnownName(framework, name, names[name])
    return None


def nearest_name(key: str) -> KnownName | None:
    """Return the name of another framework that is spelled most like ``key``, in full or without its groups;
    None when none is close."""
    every = {name for names in NAMES.values() for name in names}
    for word in (key, key.rpartition(".")[2]):
        if close := get_close_matches(word, every, n=1, cutoff=_CLOSE):
            return known_name(close[0])
    return None


def has_names_below(key: str) -> bool:
    """Return whether a framework has a group of this name that the configuration here lacks."""
    return any(name.startswith(f"{key}.") for names in NAMES.values() for name in names)
