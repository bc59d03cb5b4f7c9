"""What verl's keys are here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nemo_like.config.frameworks import verl_values as to
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
from nemo_like.config.frameworks.value_changes import (
    CRITICS_ROUTERS,
    PRECISIONS,
    all_tokens,
    home,
    is_listed,
    item,
    model_directory,
    one_of,
    period,
)
from nemo_like.config.frameworks.verl_values import ACTOR, MODEL, ROLLOUT

_REFERENCE = "actor_rollout_ref.ref"
_UPDATES = "counted in optimizer updates: x the updates of a step"
_SPEED = "a matter of speed and memory, which the backend here settles itself"
_WHOLE = "a step's shards are balanced by length"
_TOOL = (
    "turns and tools belong to an environment: mcp has the tools of MCP servers, agent runs a loop of your "
    "own (docs/agents.md), custom is an environment of your own (docs/environments.md)"
)
# Of override_transformer_config, by the same names here.
_PASSED_TO_MEGATRON = (
    "attention_backend",
    "moe_token_dispatcher_type",
    "moe_permute_fusion",
    "moe_router_dtype",
    "recompute_modules",
)
_AGENT_LOOP = "write the loop as an agent that calls an endpoint, docs/agents.md"


def _optimizer(theirs: str, group: str) -> dict[str, Entry]:
    """Return the entries of an optimizer with its learning rate over time."""
    warmup, style = f"{group}.scheduler.warmup_updates", f"{group}.scheduler.decay_style"
    return {
        f"{theirs}.lr": f"{group}.optimizer.lr",
        f"{theirs}.lr_warmup_steps": Here(warmup, _UPDATES, to.warmup(theirs)),
        f"{theirs}.lr_warmup_steps_ratio": Here(warmup, "of the run's steps", to.warmup(theirs)),
        f"{theirs}.weight_decay": f"{group}.optimizer.weight_decay",
        f"{theirs}.betas": (
            Here(f"{group}.optimizer.adam_beta1", "the first", item(0)),
            Here(f"{group}.optimizer.adam_beta2", "the second", item(1)),
        ),
        f"{theirs}.lr_scheduler_type": (
            Here(style, "", to.decay_style(theirs)),
            Here(f"{group}.scheduler.decay_updates", _UPDATES, to.decay_updates(theirs)),
        ),
        f"{theirs}.lr_decay_style": (
            Here(style, "", to.decay_style(theirs)),
            Here(f"{group}.scheduler.decay_updates", _UPDATES, to.decay_updates(theirs)),
        ),
        f"{theirs}.lr_decay_steps": Here(
            f"{group}.scheduler.decay_updates", _UPDATES, to.decay_updates(theirs)
        ),
        f"{theirs}.min_lr_ratio": Here(
            f"{group}.scheduler.min_lr",
            "x lr, with a decay",
            to.min_lr(theirs, to.share_of_lr(theirs)),
        ),
        f"{theirs}.min_lr": Here(
            f"{group}.scheduler.min_lr", "with a decay", to.min_lr(theirs, lambda value, _: value)
        ),
        f"{theirs}.optimizer": Always(("AdamW", "adam"), "the optimizer is AdamW; leave it out"),
        f"{theirs}.warmup_style": NoEffect("lr_scheduler_type says it"),
        f"{theirs}.lr_warmup_init": NoEffect("a warm-up begins at 0"),
        f"{theirs}.weight_decay_incr_style": Always(("constant",), "the weight decay stays"),
        f"{theirs}.clip_grad": NoEffect("grad_clip says it"),
        f"{theirs}": NoEffect(_SPEED),
    }


def _layout(theirs: str, group: str) -> dict[str, Entry]:
    """Return the entries of how a model is spread over GPUs, of both backends."""
    fsdp = {ACTOR: "fsdp_config", "critic": "fsdp", _REFERENCE: "fsdp_config"}[theirs]
    megatron = f"{theirs}.megatron"
    offload = f"{group}.offload_parameters_between_phases"
    return {
        f"{theirs}.{fsdp}.param_offload": offload,
        f"{theirs}.{fsdp}.optimizer_offload": f"{group}.offload_optimizer_for_logprob",
        f"{theirs}.{fsdp}.offload_policy": f"{group}.fsdp_cfg.cpu_offload",
        f"{theirs}.{fsdp}.dtype": Here(f"{group}.precision", "", one_of(PRECISIONS, "set policy.precision")),
        f"{theirs}.{fsdp}.ulysses_sequence_parallel_size": _ulysses(group),
        f"{theirs}.ulysses_sequence_parallel_size": _ulysses(group),
        f"{theirs}.{fsdp}": NoEffect(_SPEED),
        **{
            f"{megatron}.{name}": f"{group}.megatron_cfg.{name}"
            for name in (*to.MEGATRON_STYLES, "expert_model_parallel_size", "use_distributed_optimizer")
        },
        f"{megatron}.sequence_parallel": Here(
            f"{group}.megatron_cfg.sequence_parallel",
            "only with tensor parallelism, as in verl",
            lambda value, each: bool(value) and int(each(f"{megatron}.tensor_model_parallel_size", 1)) > 1,
        ),
        f"{megatron}.expert_tensor_parallel_size": Missing(
            "a mixture's experts are divided by expert_model_parallel_size alone", (None, 1)
        ),
        f"{megatron}.virtual_pipeline_model_parallel_size": Missing("a pipeline stage is one piece"),
        f"{megatron}.param_offload": offload,
        f"{megatron}.optimizer_offload": f"{group}.offload_optimizer_for_logprob",
        f"{megatron}.grad_offload": NoEffect("gradients leave with the optimizer's state"),
        f"{megatron}.dtype": Here(f"{group}.precision", "", one_of(PRECISIONS, "set policy.precision")),
        f"{megatron}.override_transformer_config.recompute_granularity": Here(
            f"{group}.megatron_cfg.activation_checkpointing",
            "`full` is true",
            one_of(
                {None: False, "full": True},
                f"parts of layers are recomputed by {group}.megatron_cfg.model_kwargs.recompute_granularity",
            ),
        ),
        **{
            f"{megatron}.override_transformer_config.{name}": f"{group}.megatron_cfg.model_kwargs.{name}"
            for name in _PASSED_TO_MEGATRON
        },
        f"{megatron}.override_transformer_config.moe_grouped_gemm": f"{group}.megatron_cfg.moe_grouped_gemm",
        f"{megatron}.router_replay.mode": NoEffect(CRITICS_ROUTERS)
        if group == "value"
        else Here(f"{group}.megatron_cfg.router_replay", "`R3` is true", to.router_replay),
        f"{megatron}": NoEffect(_SPEED),
        f"{theirs}.profiler": NoEffect("logger.profile and logger.nvtx_ranges profile a run"),
        f"{theirs}.checkpoint": NoEffect("a checkpoint has all that a run needs to continue"),
    }


def _ulysses(group: str) -> Missing:
    return Missing(
        f"sequences are divided with {group}.backend=megatron alone, by "
        f"{group}.megatron_cfg.context_parallel_size; more micro-batches need less memory too",
        (None, 1),
    )


_BASE: dict[str, Entry] = {
    f"{MODEL}.path": Here("policy.model_name", "a directory, not a name on the hub", model_directory),
    f"{MODEL}.enable_gradient_checkpointing": Here(
        "policy.fsdp_cfg.activation_checkpointing",
        "of backend fsdp",
        lambda value, theirs: LEFT_OUT if to.is_megatron(theirs) else bool(value),
    ),
    f"{MODEL}.use_remove_padding": Here(
        "policy.sequence_packing.enabled",
        "with use_dynamic_bsz; micro-batches of a fixed number of samples are padded, with the same results",
        lambda value, theirs: bool(theirs(f"{ACTOR}.use_dynamic_bsz", False)),
    ),
    f"{MODEL}.lora_rank": (
        Here("policy.lora.enabled", "above 0", lambda value, theirs: int(value or 0) > 0),
        Here("policy.lora.rank", "above 0", to.rank(MODEL)),
    ),
    f"{MODEL}.lora_alpha": Here("policy.lora.alpha", "with lora_rank above 0", to.rank(MODEL)),
    f"{MODEL}.target_modules": Here("policy.lora.target_modules", "with lora_rank above 0", to.targets),
    f"{MODEL}.exclude_modules": Missing("name the layers in policy.lora.target_modules", (None, [])),
    f"{MODEL}.lora_adapter_path": Missing("adapters begin anew; merge the old ones into the model"),
    f"{MODEL}.lora.rank": Missing("set policy.lora.enabled=true and policy.lora.rank", (None, 0)),
    f"{MODEL}.lora": NoEffect("policy.lora has the keys of adapters"),
    f"{MODEL}.tokenizer_path": Missing("a model's tokenizer is in its directory"),
    f"{MODEL}.custom_chat_template": "data.chat_template",
    f"{MODEL}.override_config": Missing("change config.json in the model's directory", (None, {})),
    f"{MODEL}.trust_remote_code": Missing("models are those of transformers and vLLM"),
    f"{MODEL}.external_lib": Missing("models are those of transformers and vLLM"),
    f"{MODEL}.mtp.enable": Missing("models have no layers that predict further tokens"),
    f"{MODEL}": NoEffect(_SPEED),
    f"{ACTOR}.strategy": Here("policy.backend", "`fsdp2` is `fsdp`", to.backend),
    f"{ACTOR}.ppo_mini_batch_size": Here(
        "policy.train_global_batch_size", "samples, not prompts: x rollout.n", to.samples
    ),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": Here(
        "policy.train_micro_batch_size", "without use_dynamic_bsz", to.micro_batch(ACTOR)
    ),
    f"{ACTOR}.ppo_micro_batch_size": Here(
        "policy.train_micro_batch_size",
        "/ data-parallel size",
        lambda value, theirs: LEFT_OUT if value is None else to.per_gpu(value, theirs),
    ),
    f"{ACTOR}.use_dynamic_bsz": "policy.sequence_packing.enabled",
    f"{ACTOR}.ppo_max_token_len_per_gpu": Here(
        "policy.sequence_packing.train_mb_tokens", "with use_dynamic_bsz", to.packs(ACTOR, "use_dynamic_bsz")
    ),
    f"{ACTOR}.clip_ratio": (
        Here("loss_fn.ratio_clip_min", "where clip_ratio_low is null", to.clip("low")),
        Here("loss_fn.ratio_clip_max", "where clip_ratio_high is null", to.clip("high")),
    ),
    f"{ACTOR}.clip_ratio_low": Here("loss_fn.ratio_clip_min", "below 1", to.clip_low),
    f"{ACTOR}.clip_ratio_high": Here(
        "loss_fn.ratio_clip_max", "", lambda value, theirs: LEFT_OUT if value is None else value
    ),
    f"{ACTOR}.clip_ratio_c": Here("loss_fn.ratio_clip_c", "with loss_mode=vanilla", to.dual_clip),
    f"{ACTOR}.loss_agg_mode": (
        Here("loss_fn.token_level_loss", "`token-mean` is true; `gspo` and `sapo` are false", to.token_level),
        Here(
            "loss_fn.sequence_length_normalizer",
            "`seq-mean-token-sum` is 1, `seq-mean-token-sum-norm` loss_scale_factor or the response's limit",
            to.normalizer,
        ),
    ),
    f"{ACTOR}.loss_scale_factor": Here(
        "loss_fn.sequence_length_normalizer", "see loss_agg_mode", lambda value, theirs: LEFT_OUT
    ),
    f"{ACTOR}.policy_loss.loss_mode": (
        Here(
            "loss_fn.kind", "`vanilla` and `cispo` are `policy_gradient`, `gspo` `gspo_token`", to.loss_kind
        ),
        Here("loss_fn.use_cispo", "`cispo`", lambda value, theirs: value == "cispo"),
        Here("loss_fn.sequence_level_importance_ratios", "`gspo`", lambda value, theirs: value == "gspo"),
    ),
    f"{ACTOR}.policy_loss.tau_pos": Here("loss_fn.arguments.tau_pos", "of `sapo`", to.tau("tau_pos")),
    f"{ACTOR}.policy_loss.tau_neg": Here("loss_fn.arguments.tau_neg", "of `sapo`", to.tau("tau_neg")),
    f"{ACTOR}.policy_loss": NoEffect("of losses that are missing here"),
    f"{ACTOR}.tau_pos": Here("loss_fn.arguments.tau_pos", "of `sapo`", to.tau("tau_pos")),
    f"{ACTOR}.tau_neg": Here("loss_fn.arguments.tau_neg", "of `sapo`", to.tau("tau_neg")),
    f"{ACTOR}.entropy_coeff": Here("loss_fn.entropy_coef", "the same sign, a bonus; 0 is null", to.entropy),
    f"{ACTOR}.calculate_entropy": Missing("loss_fn.entropy_coef=0 reports the entropy"),
    f"{ACTOR}.calculate_sum_pi_squared": Missing("no estimator here needs it"),
    f"{ACTOR}.use_kl_loss": Here(
        "loss_fn.reference_policy_kl_penalty", "kl_loss_coef where it is true, else 0", to.kl_penalty
    ),
    f"{ACTOR}.kl_loss_coef": Here("loss_fn.reference_policy_kl_penalty", "with use_kl_loss", to.kl_penalty),
    f"{ACTOR}.kl_loss_type": Here(
        "loss_fn.reference_policy_kl_type",
        "`kl` is k1, `mse` k2, `low_var_kl` k3; on their gradients see docs/losses.md",
        to.kl_kind(f"{ACTOR}.use_kl_loss", True),
    ),
    f"{ACTOR}.ppo_epochs": "grpo.num_epochs_per_rollout",
    f"{ACTOR}.grad_clip": "policy.max_grad_norm",
    f"{ACTOR}.shuffle": Here("grpo.mix_groups_in_updates", "true mixes samples of many prompts in an update"),
    f"{ACTOR}.freeze_vision_tower": "policy.freeze_vision_tower",
    f"{ACTOR}.router_replay.mode": Here(
        "policy.megatron_cfg.router_replay", "`R3` is true", to.router_replay
    ),
    f"{ACTOR}.router_replay": NoEffect("choices travel through the data plane"),
    **{
        f"{ACTOR}.{name}": NoEffect(_SPEED)
        for name in (
            "rollout_n",
            "use_torch_compile",
            "use_fused_kernels",
            "entropy_from_logits_with_chunking",
            "entropy_from_logits_chunk_size",
            "entropy_checkpointing",
            "pad_to_length",
            "use_remove_padding",
            "data_loader_seed",
            "use_prefix_grouper",
            "qat",
            "engine",
            "nccl_timeout",
            "rope_config",
        )
    },
    **_optimizer(f"{ACTOR}.optim", "policy"),
    **_layout(ACTOR, "policy"),
}

_SAMPLING: dict[str, Entry] = {
    f"{ROLLOUT}.name": Always(("vllm", "???"), "vLLM generates; leave it out"),
    f"{ROLLOUT}.n": "grpo.num_generations_per_prompt",
    f"{ROLLOUT}.temperature": "generation.temperature",
    f"{ROLLOUT}.top_p": "generation.top_p",
    f"{ROLLOUT}.top_k": Here("generation.top_k", "-1 is null", all_tokens),
    f"{ROLLOUT}.do_sample": Always((True,), "training samples; leave it out"),
    f"{ROLLOUT}.ignore_eos": Always((False,), "a response ends at an eos token; leave it out"),
    f"{ROLLOUT}.tensor_model_parallel_size": "generation.vllm_cfg.tensor_parallel_size",
    f"{ROLLOUT}.gpu_memory_utilization": "generation.vllm_cfg.gpu_memory_utilization",
    f"{ROLLOUT}.enforce_eager": "generation.vllm_cfg.enforce_eager",
    f"{ROLLOUT}.max_num_seqs": "generation.vllm_cfg.max_num_seqs",
    f"{ROLLOUT}.quantization": Here(
        "generation.vllm_cfg.quantization",
        "`fp8`, or null",
        one_of({None: None, "fp8": "fp8"}, "set generation.vllm_cfg.quantization=fp8"),
    ),
    f"{ROLLOUT}.dtype": NoEffect("engines have the precision of policy.precision"),
    f"{ROLLOUT}.expert_parallel_size": Missing(
        "an engine is divided by generation.vllm_cfg.tensor_parallel_size alone", (None, 1)
    ),
    f"{ROLLOUT}.pipeline_model_parallel_size": Missing(
        "an engine is divided by generation.vllm_cfg.tensor_parallel_size alone", (None, 1)
    ),
    f"{ROLLOUT}.data_parallel_size": Missing("set generation.num_engines", (None, 1)),
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": Here(
        "policy.logprob_batch_size", "without use_dynamic_bsz", to.micro_batch(ROLLOUT)
    ),
    f"{ROLLOUT}.log_prob_micro_batch_size": Here(
        "policy.logprob_batch_size",
        "/ data-parallel size",
        lambda value, theirs: LEFT_OUT if value is None else to.per_gpu(value, theirs),
    ),
    f"{ROLLOUT}.log_prob_max_token_len_per_gpu": Here(
        "policy.sequence_packing.logprob_mb_tokens",
        "with use_dynamic_bsz",
        to.packs(ACTOR, "use_dynamic_bsz"),
    ),
    f"{ROLLOUT}.val_kwargs.n": "grpo.num_val_generations_per_prompt",
    f"{ROLLOUT}.val_kwargs.temperature": Here(
        "generation.validation.temperature", "0 without do_sample", to.is_sampling("temperature")
    ),
    f"{ROLLOUT}.val_kwargs.top_p": Here(
        "generation.validation.top_p", "with do_sample", to.is_sampling("top_p")
    ),
    f"{ROLLOUT}.val_kwargs.top_k": Here(
        "generation.validation.top_k", "with do_sample; -1 is 0", to.is_sampling("top_k")
    ),
    f"{ROLLOUT}.val_kwargs.do_sample": Here(
        "generation.validation.temperature", "see temperature", lambda value, theirs: LEFT_OUT
    ),
    f"{ROLLOUT}.multi_turn.enable": Missing(_TOOL),
    f"{ROLLOUT}.multi_turn": NoEffect(_TOOL),
    f"{ROLLOUT}.nnodes": Missing("set cluster.placement=separate and generation.num_engines", (None, 0)),
    f"{ROLLOUT}.max_model_len": NoEffect("policy.max_total_sequence_length is the engines' limit"),
    f"{ROLLOUT}.prompt_length": NoEffect("data.max_prompt_length says it"),
    f"{ROLLOUT}.response_length": NoEffect("data.max_response_length says it"),
    f"{ROLLOUT}.engine_kwargs.vllm": Here(
        "generation.vllm_kwargs", "", lambda value, theirs: dict(value) if value else LEFT_OUT
    ),
    f"{ROLLOUT}.mtp": NoEffect("generation.vllm_kwargs.speculative_config has engines draft"),
    f"{ROLLOUT}.disaggregation.enabled": Missing("an engine reads prompts and decodes in one place"),
    f"{ROLLOUT}.checkpoint_engine": NoEffect("generation.weight_transport and weight_bucket_mib say it"),
    f"{ROLLOUT}.enable_rollout_routing_replay": "policy.megatron_cfg.router_replay",
    f"{ROLLOUT}.over_sample_rate": Missing("a step waits for all its samples", (None, 0, 0.0)),
    f"{ROLLOUT}.agent.default_agent_loop": Missing(_AGENT_LOOP, (None, "single_turn_agent")),
    f"{ROLLOUT}.agent.agent_loop_config_path": Missing(_AGENT_LOOP, (None,)),
    f"{ROLLOUT}.agent": NoEffect("goes with agent loops, see docs/agents.md"),
    f"{ROLLOUT}": NoEffect("the engine's own affair"),
    f"{_REFERENCE}": NoEffect("it has the policy's layout and batches, and waits on the host"),
    "actor_rollout_ref.hybrid_engine": Here(
        "cluster.placement",
        "true is `colocated`",
        lambda value, theirs: "colocated" if value else "separate",
    ),
    "actor_rollout_ref.nccl_timeout": NoEffect("cluster.stage_timeout_s is the deadline of a stage"),
    "model_engine": NoEffect("actor.strategy says it"),
}

_ALGORITHM: dict[str, Entry] = {
    "algorithm.adv_estimator": Here(
        "grpo.adv_estimator.name", "`gae` also adds the group value, the critic", to.estimator
    ),
    "algorithm.norm_adv_by_std_in_grpo": "grpo.normalize_rewards",
    "algorithm.gamma": "value.gae_gamma",
    "algorithm.lam": "value.gae_lambda",
    "algorithm.use_kl_in_reward": (
        Here("loss_fn.use_kl_in_reward", "for estimators that whiten, and `gae`", to.in_reward),
        Here("loss_fn.reference_policy_kl_penalty", "kl_ctrl.kl_coef where it is true", to.kl_penalty),
    ),
    "algorithm.kl_penalty": Here(
        "loss_fn.reference_policy_kl_type",
        "with use_kl_in_reward; as actor.kl_loss_type",
        to.kl_kind("algorithm.use_kl_in_reward", True),
    ),
    "algorithm.kl_ctrl.kl_coef": Here(
        "loss_fn.reference_policy_kl_penalty", "with use_kl_in_reward", to.kl_penalty
    ),
    "algorithm.kl_ctrl.type": Always(("fixed",), "the coefficient of the KL stays; set type=fixed"),
    "algorithm.kl_ctrl": NoEffect("of an adaptive coefficient"),
    "algorithm.filter_groups.enable": "grpo.use_dynamic_sampling",
    "algorithm.filter_groups.max_num_gen_batches": Here(
        "grpo.dynamic_sampling_max_gen_batches",
        "0, no limit, is 1000",
        lambda value, theirs: int(value) if int(value or 0) > 0 else 1000,
    ),
    "algorithm.filter_groups.metric": Missing(
        "groups are compared by their raw rewards",
        (None, "acc", "score", "seq_reward", "seq_final_reward"),
    ),
    "algorithm.filter_groups": NoEffect("rollouts follow one another"),
    "algorithm.rollout_correction.rollout_is": Here(
        "loss_fn.use_importance_sampling_correction", "`token`, or null for false", to.is_corrected
    ),
    "algorithm.rollout_correction.rollout_is_threshold": (
        Here("loss_fn.truncated_importance_sampling_type", "`tis`; two bounds: `icepop`", to.bounds("type")),
        Here("loss_fn.truncated_importance_sampling_ratio", "the upper bound", to.bounds("high")),
        Here("loss_fn.truncated_importance_sampling_ratio_min", "the lower bound", to.bounds("low")),
    ),
    "algorithm.rollout_correction.rollout_rs": Missing(
        "set loss_fn.truncated_importance_sampling_type=seq_mask, or grpo.seq_logprob_error_threshold"
    ),
    "algorithm.rollout_correction.rollout_rs_threshold": NoEffect("goes with rollout_rs"),
    "algorithm.rollout_correction.bypass_mode": "loss_fn.use_generation_logprobs_as_prev",
    "algorithm.rollout_correction.loss_type": Always(
        ("ppo_clip",), "the ratio to the engine's log-probs is clipped; for REINFORCE see docs/losses.md"
    ),
    "algorithm.rollout_correction.rollout_is_batch_normalize": Always((False,), "weights are as they are"),
    "algorithm.use_pf_ppo": Missing("samples are not drawn again by their rewards"),
    "algorithm.pf_ppo": NoEffect("goes with use_pf_ppo"),
}

_DATA: dict[str, Entry] = {
    "data.train_batch_size": "grpo.num_prompts_per_step",
    "data.max_prompt_length": (
        Here("data.max_input_seq_length"),
        Here("policy.max_total_sequence_length", "+ data.max_response_length", to.length),
    ),
    "data.max_response_length": (
        Here("generation.max_new_tokens"),
        Here("policy.max_total_sequence_length", "+ data.max_prompt_length", to.length),
    ),
    "data.train_files": Here("data.train", "one source, or a list; Parquet is `huggingface`", to.files),
    "data.val_files": Here("data.validation", "one source, or a list; Parquet is `huggingface`", to.files),
    "data.prompt_key": Here("data.train.prompt_key", "of every source", lambda value, theirs: LEFT_OUT),
    "data.image_key": Missing("set data.default.images_key for a model that reads images", (None, "images")),
    "data.video_key": Missing("models read images alone", (None, "videos")),
    "data.audio_key": Missing("models read images alone", (None, "audios")),
    "data.shuffle": Here("data.shuffle", "the same key"),
    "data.seed": Here("grpo.seed", "", lambda value, theirs: LEFT_OUT if value is None else value),
    "data.val_max_samples": Here(
        "grpo.max_val_samples",
        "below 1 is a billion: all",
        lambda value, theirs: int(value) if int(value) > 0 else 10**9,
    ),
    "data.train_max_samples": Missing("choose rows by data.train.split, such as train[:1000]", (None, -1)),
    "data.gen_batch_size": Missing("a rollout is of grpo.num_prompts_per_step prompts"),
    "data.val_batch_size": NoEffect("engines get all problems of a validation at once"),
    "data.filter_overlong_prompts": NoEffect("longer prompts are always left out"),
    "data.truncation": Here(
        "data.max_input_seq_length",
        "`error` alone: longer prompts are left out",
        lambda value, theirs: LEFT_OUT if value == "error" else to.truncation(value, theirs),
    ),
    "data.reward_fn_key": NoEffect("a source names its environment"),
    "data.tokenizer": Missing("a model's tokenizer is in its directory"),
    "data.custom_cls.path": Missing("write the problems into JSON lines or Parquet, see docs/data.md"),
    "data.apply_chat_template_kwargs": Missing(
        "a template gets no arguments; write them into a template of your own, data.chat_template",
        (None, {}),
    ),
    "data.mm_processor_kwargs": Missing("images are read by the model's own processor", (None, {})),
    "data.tool_config_path": Missing(_TOOL),
    "data.function_tool_path": Missing(_TOOL),
    **{
        f"data.{name}": NoEffect("problems are read as docs/data.md says")
        for name in (
            "use_shm",
            "return_raw_input_ids",
            "return_raw_chat",
            "return_full_prompt",
            "dataloader_num_workers",
            "image_patch_size",
            "validation_shuffle",
            "trust_remote_code",
            "filter_overlong_prompts_workers",
            "return_multi_modal_inputs",
            "custom_cls.name",
        )
    },
}

_REWARDS: dict[str, Entry] = {
    **{
        f"{group}.custom_reward_function.path".removeprefix("."): Missing(
            "write the reward as function(turn, **arguments) and choose `- env@env.NAME: function`, see "
            "docs/environments.md"
        )
        for group in ("", "reward")
    },
    **{
        f"{group}.custom_reward_function".removeprefix("."): NoEffect("goes with its path")
        for group in ("", "reward")
    },
    **{
        f"{group}.reward_kwargs.{name}": Here(f"grpo.reward_shaping.{ours}", how, to.overlong)
        for group in ("reward_model", "reward")
        for name, ours, how in (
            ("overlong_buffer_cfg.enable", "enabled", "the penalty of DAPO"),
            ("overlong_buffer_cfg.len", "overlong_buffer_length", "where it is enabled"),
            ("overlong_buffer_cfg.penalty_factor", "overlong_buffer_penalty", "where it is enabled"),
            ("max_resp_len", "max_response_length", "where the penalty is enabled"),
        )
    },
    "reward_model.reward_manager": Here(
        "grpo.reward_shaping.enabled",
        "`naive` and `dapo`; the latter's penalty is under reward_kwargs",
        lambda value, theirs: (
            LEFT_OUT if value in (None, "naive", "dapo") else to.reward_manager(value, theirs)
        ),
    ),
    "reward_model.enable": Missing("choose `- env@env.NAME: reward_model`, see docs/environments.md"),
    "reward_model": NoEffect(to.REWARD),
    "reward.reward_manager.name": Here(
        "grpo.reward_shaping.enabled",
        "`naive` and `dapo`; the latter's penalty is under reward_kwargs",
        lambda value, theirs: (
            LEFT_OUT if value in (None, "naive", "dapo") else to.reward_manager(value, theirs)
        ),
    ),
    "reward.reward_model.enable": Missing("choose `- env@env.NAME: reward_model`, see docs/environments.md"),
    "reward.num_workers": "env.math.num_actors",
    "reward": NoEffect(to.REWARD),
    "sandbox_fusion": NoEffect("programs run in a sandbox of the environment code"),
}

_CRITIC: dict[str, Entry] = {
    "critic.enable": NoEffect("algorithm.adv_estimator=gae asks for a critic"),
    "critic.strategy": Here("value.backend", "`fsdp2` is `fsdp`", to.backend),
    "critic.model.path": Here("value.model_name", "a directory, not a name on the hub", model_directory),
    "critic.model.enable_gradient_checkpointing": Here(
        "value.fsdp_cfg.activation_checkpointing",
        "of backend fsdp",
        lambda value, theirs: LEFT_OUT if theirs("critic.strategy") == "megatron" else bool(value),
    ),
    "critic.model.use_remove_padding": Here(
        "value.sequence_packing.enabled",
        "with use_dynamic_bsz",
        lambda value, theirs: bool(theirs("critic.use_dynamic_bsz", False)),
    ),
    "critic.model.lora_rank": Missing("a critic has no adapters", (None, 0)),
    "critic.model": NoEffect("a critic's model is a Hugging Face directory"),
    "critic.ppo_mini_batch_size": Here(
        "value.train_global_batch_size", "samples, not prompts: x rollout.n", to.samples
    ),
    "critic.ppo_micro_batch_size_per_gpu": Here(
        "value.train_micro_batch_size",
        "without use_dynamic_bsz",
        lambda value, theirs: LEFT_OUT if value is None or theirs("critic.use_dynamic_bsz", False) else value,
    ),
    "critic.forward_micro_batch_size_per_gpu": Here(
        "value.logprob_batch_size",
        "without use_dynamic_bsz",
        lambda value, theirs: LEFT_OUT if value is None or theirs("critic.use_dynamic_bsz", False) else value,
    ),
    "critic.use_dynamic_bsz": "value.sequence_packing.enabled",
    "critic.ppo_max_token_len_per_gpu": Here(
        "value.sequence_packing.train_mb_tokens",
        "with use_dynamic_bsz",
        to.packs("critic", "use_dynamic_bsz"),
    ),
    "critic.forward_max_token_len_per_gpu": Here(
        "value.sequence_packing.logprob_mb_tokens",
        "with use_dynamic_bsz",
        to.packs("critic", "use_dynamic_bsz"),
    ),
    "critic.ppo_epochs": "value.num_epochs_per_rollout",
    "critic.grad_clip": "value.max_grad_norm",
    "critic.cliprange_value": "value.clip_range",
    "critic.loss_agg_mode": Always(("token-mean",), "the critic's loss is a mean over tokens"),
    **_optimizer("critic.optim", "value"),
    **_layout("critic", "value"),
    "critic": NoEffect(_SPEED),
}


def _no_checkpoints(value: Any, theirs: Theirs) -> bool:
    return int(value or 0) > 0


def _resumes(value: Any, theirs: Theirs) -> bool:
    kinds = {"auto": True, "disable": False}
    return one_of(kinds, "put the checkpoint into the run's directory")(value, theirs)


_TRAINER: dict[str, Entry] = {
    "trainer.total_training_steps": Here("grpo.max_num_steps", "", to.steps),
    "trainer.total_epochs": Here("grpo.max_num_steps", "x problems / data.train_batch_size", to.epochs),
    "trainer.n_gpus_per_node": (
        Here("cluster.gpus_per_node"),
        Here("policy.data_parallel_size", "GPUs / GPUs of a replica", to.data_parallel_size),
        Here("generation.num_engines", "GPUs / GPUs of an engine", to.num_engines),
    ),
    "trainer.nnodes": (
        Here("cluster.num_nodes"),
        Here("cluster.address", "`auto` for several nodes", to.address),
    ),
    "trainer.project_name": "logger.wandb.project",
    "trainer.experiment_name": "logger.run_name",
    "trainer.logger": (
        Here("logger.wandb.mode", "`online` with `wandb`", is_listed("wandb", "online", "disabled")),
        Here("logger.tensorboard.enabled", "with `tensorboard`", is_listed("tensorboard", True, False)),
        Here("logger.mlflow.enabled", "with `mlflow`", is_listed("mlflow", True, False)),
    ),
    "trainer.log_val_generations": "logger.num_sample_answers",
    "trainer.rollout_data_dir": Here(
        "rollout.dump_period", "1 where it is a directory", lambda value, theirs: 1 if value else LEFT_OUT
    ),
    "trainer.validation_data_dir": Here(
        "rollout.dump_validation",
        "true where it is a directory",
        lambda value, theirs: True if value else LEFT_OUT,
    ),
    "trainer.save_freq": (
        Here("checkpointing.save_period", "below 1 is 0", period),
        Here("checkpointing.enabled", "above 0", _no_checkpoints),
    ),
    "trainer.test_freq": Here("grpo.val_period", "below 1 is 0: never", period),
    "trainer.val_before_train": "grpo.val_at_start",
    "trainer.val_only": Missing("scripts/evaluate.py validates without training, see docs/evaluate.md"),
    "trainer.critic_warmup": "value.warmup_steps",
    "trainer.default_local_dir": Here(
        "checkpointing.checkpoint_dir", "", lambda value, theirs: home(str(value))
    ),
    "trainer.default_hdfs_dir": Missing("checkpoints are on a file system that all nodes have"),
    "trainer.max_actor_ckpt_to_keep": "checkpointing.keep_top_k",
    "trainer.resume_mode": Here("checkpointing.resume_if_exists", "`auto`, or `disable` for false", _resumes),
    "trainer.resume_from_path": Missing("put the checkpoint into the run's directory, docs/checkpoints.md"),
    "trainer.device": Here(
        "policy.device", "", one_of({"cuda": "cuda", "cpu": "cpu"}, "set policy.device=cuda")
    ),
    "trainer.balance_batch": NoEffect(_WHOLE),
    "trainer.v1.trainer_mode": Always(
        ("sync",), "set it to sync, and here grpo.max_staleness=1 for rollouts that run ahead, docs/async.md"
    ),
    "trainer": NoEffect("a run settles it itself"),
    "ray_kwargs.ray_init.num_cpus": "cluster.num_cpus",
    "ray_kwargs": NoEffect("a private Ray starts, or cluster.address joins one"),
    "global_profiler": NoEffect("logger.profile and logger.nvtx_ranges profile a run"),
    "skip": NoEffect("rollout.record and rollout.replay do so"),
    "distillation.enabled": Missing("set loss_fn.kind=distillation and teacher=default, see docs/losses.md"),
    "distillation": NoEffect("goes with distillation.enabled"),
    "transfer_queue": NoEffect("data_plane has the keys of TransferQueue"),
}


def _sections(*tables: Mapping[str, Entry]) -> dict[str, Entry]:
    return {key: entry for table in tables for key, entry in table.items()}


VERL = Framework(
    name="verl",
    keys=_sections(_BASE, _SAMPLING, _ALGORITHM, _DATA, _REWARDS, _CRITIC, _TRAINER),
    switches=(
        Switch("critic", "algorithm.adv_estimator", ("gae",)),
        Switch("algorithm.gamma", "algorithm.adv_estimator", ("gae",)),
        Switch("algorithm.lam", "algorithm.adv_estimator", ("gae",)),
        Switch("algorithm.filter_groups", "algorithm.filter_groups.enable"),
        Switch("algorithm.norm_adv_by_std_in_grpo", "algorithm.adv_estimator", ("grpo", "grpo_vectorized")),
        Switch("trainer.critic_warmup", "algorithm.adv_estimator", ("gae",)),
        Switch(f"{ACTOR}.fsdp_config", f"{ACTOR}.strategy", ("fsdp", "fsdp2")),
        Switch(f"{ACTOR}.megatron", f"{ACTOR}.strategy", ("megatron",)),
        Switch("critic.fsdp", "critic.strategy", ("fsdp", "fsdp2")),
        Switch("critic.megatron", "critic.strategy", ("megatron",)),
    ),
    habits={
        "grpo.mix_groups_in_updates": (False, "an update takes neighbouring samples"),
        "grpo.skip_idle_samples": (False, "every sample gets a training pass"),
        "grpo.seq_logprob_error_threshold": (None, "no sample is masked for its log-probs"),
        "grpo.val_at_end": (True, "a run ends with a validation"),
        "checkpointing.metric_name": (None, "the latest checkpoints are kept"),
        "value.bootstrap_truncated": (False, "a truncated sample ends with 0"),
        "data.default.system_prompt": (None, "prompts are whole conversations"),
        "data.default.prompt_template": (None, "prompts are whole conversations"),
    },
)
