"""What OpenRLHF's arguments are here."""

from __future__ import annotations

from nemo_like.config.frameworks.entries import Entry, Framework

_KEYS: dict[str, Entry] = {
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
}

OPENRLHF = Framework(name="OpenRLHF", keys=_KEYS)
