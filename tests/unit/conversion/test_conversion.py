"""Configurations in the style of NeMo-RL and verl, and what they are here, worked out by hand."""

from __future__ import annotations

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from nemo_like.config.other_frameworks import our_keys
from nemo_like.config.problems import ConfigError
from nemo_like.configuration import load_config
from nemo_like.environments.per_turn import extract_answer
from nemo_like_tools.conversion import nemo_rl, nemo_rl_data, trl, values, verl
from nemo_like_tools.conversion.their_files import read_theirs
from nemo_like_tools.conversion.translation import (
    CONVERTIBLE,
    Conversion,
    conversion_of,
    convert_configuration,
    framework_of,
)
from nemo_like_tools.conversion.values import Theirs
from nemo_like_tools.conversion.writing import conversion_yaml

SCRIPT = Path(__file__).parents[3] / "scripts" / "convert_config.py"

NEMO_RL = """
grpo:
  num_prompts_per_step: 16
  num_generations_per_prompt: 8
  max_num_steps: 30
  normalize_rewards: false
  use_leave_one_out_baseline: true
  val_period: -1
  async_grpo: {enabled: false, max_trajectory_age_steps: 1}
loss_fn: {ratio_clip_max: 0.28, truncated_importance_sampling_type: seq-mask-tis}
checkpointing: {metric_name: "val:accuracy"}
policy:
  model_name: Some/Model-1B
  tokenizer: {name: "${policy.model_name}"}
  train_global_batch_size: 32
  train_micro_batch_size: 2
  max_total_sequence_length: 1000
  precision: bfloat16
  dtensor_cfg: {enabled: false, tensor_parallel_size: 8, context_parallel_size: 2}
  optimizer: null
  megatron_cfg:
    enabled: true
    tensor_model_parallel_size: 2
    optimizer: {lr: 2.0e-6, min_lr: 1.0e-7, use_distributed_optimizer: true}
    scheduler: {lr_decay_style: cosine, lr_decay_iters: 20, lr_warmup_iters: 5}
    peft: {enabled: false, dim: 64}
  sequence_packing: {enabled: true, train_mb_tokens: "${mul:${policy.max_total_sequence_length}, 2}"}
  generation:
    max_new_tokens: ${policy.max_total_sequence_length}
    top_k: null
    stop_strings: null
    vllm_cfg: {tensor_parallel_size: 4, gpu_memory_utilization: 0.6, precision: fp8}
    colocated: {enabled: true}
data:
  max_input_seq_length: 200
  train: {dataset_name: DeepScaler}
  validation: {dataset_name: ResponseDataset, data_path: held_out.jsonl, input_key: question}
  default: {env_name: math}
env: {math: {num_workers: 3}}
logger: {wandb_enabled: false}
cluster: {gpus_per_node: 8, num_nodes: 1}
"""

NEMO_RL_HERE: dict[str, Any] = {
    "grpo.num_prompts_per_step": 16,
    "grpo.normalize_rewards": False,
    "grpo.use_leave_one_out_baseline": True,
    "grpo.val_period": 0,  # -1 is never
    "grpo.mix_groups_in_updates": False,
    "loss_fn.ratio_clip_max": 0.28,
    "loss_fn.truncated_importance_sampling_type": "seq_mask",
    "checkpointing.metric_name": "validation/accuracy",
    "policy.model_name": "models/Model-1B",
    "policy.backend": "megatron",
    "policy.data_parallel_size": 4,  # 8 GPUs in replicas of 2
    "policy.megatron_cfg.tensor_model_parallel_size": 2,
    "policy.megatron_cfg.use_distributed_optimizer": True,
    "policy.optimizer.lr": 2.0e-6,
    "policy.scheduler.min_lr": 1.0e-7,
    "policy.scheduler.warmup_updates": 20,  # 5 steps of 16 x 8 / 32 = 4 updates
    "policy.scheduler.decay_updates": 80,  # 20 steps
    "policy.sequence_packing.train_mb_tokens": 2000,
    "policy.offload_parameters_between_phases": True,  # engines share the GPUs
    "generation.max_new_tokens": 800,  # 1000 less the prompt's 200
    "generation.top_k": None,
    "generation.stop_strings": [],
    "generation.num_engines": 2,  # 8 GPUs in engines of 4
    "generation.vllm_cfg.quantization": "fp8",
    "env.math.num_actors": 3,
    "logger.wandb.mode": "disabled",
    "cluster.placement": "colocated",
    "data.validation": {
        "kind": "jsonl",
        "path": "held_out.jsonl",
        "prompt_key": "question",
        "answer_key": "output",
    },
}

VERL = """
actor_rollout_ref:
  hybrid_engine: true
  model: {path: /models/seven, enable_gradient_checkpointing: true, use_remove_padding: true, lora_rank: 0}
  actor:
    _target_: verl.workers.config.FSDPActorConfig
    strategy: fsdp2
    ppo_mini_batch_size: 64
    ppo_micro_batch_size_per_gpu: 4
    use_dynamic_bsz: true
    ppo_max_token_len_per_gpu: 9000
    clip_ratio: 0.2
    clip_ratio_low: 0.1
    clip_ratio_high: 0.3
    clip_ratio_c: 3.0
    loss_agg_mode: seq-mean-token-sum-norm
    entropy_coeff: 0
    use_kl_loss: true
    kl_loss_coef: 0.002
    kl_loss_type: low_var_kl
    ppo_epochs: 2
    grad_clip: 0.5
    optim: {lr: 3e-6, lr_warmup_steps: -1, lr_warmup_steps_ratio: 0.1, betas: [0.9, 0.95]}
    fsdp_config: {param_offload: true, optimizer_offload: true, ulysses_sequence_parallel_size: 2}
    megatron: {tensor_model_parallel_size: 4}
  rollout:
    name: vllm
    n: 4
    over_sample_rate: 0.1
    temperature: 0.8
    top_k: -1
    tensor_model_parallel_size: 2
    gpu_memory_utilization: 0.5
    val_kwargs: {do_sample: false, temperature: 0, n: 2, top_p: 1.0}
    multi_turn: {enable: false}
algorithm: {adv_estimator: grpo, norm_adv_by_std_in_grpo: false, use_kl_in_reward: false, gamma: 1.0}
critic: {optim: {lr: 1e-5}, ppo_epochs: 3}
data:
  train_files: [~/gsm8k/train.parquet, ~/math/train.parquet]
  val_files: ~/gsm8k/test.parquet
  train_batch_size: 256
  max_prompt_length: 500
  max_response_length: 1500
  truncation: error
trainer:
  total_training_steps: 100
  total_epochs: 15
  n_gpus_per_node: 8
  nnodes: 2
  logger: [console, wandb]
  save_freq: -1
  test_freq: 5
  max_actor_ckpt_to_keep: null
"""

VERL_HERE: dict[str, Any] = {
    "grpo.num_prompts_per_step": 256,
    "grpo.num_generations_per_prompt": 4,
    "grpo.num_epochs_per_rollout": 2,
    "grpo.max_num_steps": 100,
    "grpo.normalize_rewards": False,
    "grpo.num_val_generations_per_prompt": 2,
    "policy.backend": "fsdp",
    "policy.model_name": "/models/seven",
    "policy.train_global_batch_size": 256,  # 64 prompts of 4 samples
    "policy.data_parallel_size": 8,
    "policy.fsdp_cfg.context_parallel_size": 2,
    "policy.sequence_packing.enabled": True,
    "policy.sequence_packing.train_mb_tokens": 9000,
    "policy.max_total_sequence_length": 2000,
    "policy.max_grad_norm": 0.5,
    "policy.fsdp_cfg.activation_checkpointing": True,
    "policy.offload_parameters_between_phases": True,
    "policy.optimizer.lr": 3.0e-6,
    "policy.optimizer.adam_beta2": 0.95,
    # A tenth of 100 steps, each of 256 / 64 updates in each of 2 epochs.
    "policy.scheduler.warmup_updates": 80,
    "loss_fn.kind": None,  # no key of theirs names it
    "loss_fn.ratio_clip_min": 0.1,
    "loss_fn.ratio_clip_max": 0.3,
    "loss_fn.ratio_clip_c": 3.0,
    "loss_fn.token_level_loss": False,
    "loss_fn.sequence_length_normalizer": 1500,
    "loss_fn.entropy_coef": None,
    "loss_fn.reference_policy_kl_penalty": 0.002,
    "loss_fn.reference_policy_kl_type": "k3",
    "generation.max_new_tokens": 1500,
    "generation.temperature": 0.8,
    "generation.top_k": None,
    "generation.validation.temperature": 0.0,
    "generation.num_engines": 8,
    "checkpointing.enabled": False,
    "cluster.address": "auto",
    "logger.wandb.mode": "online",
}


def converted(tmp_path: Path, text: str, *arguments: str) -> Conversion:
    path = tmp_path / "theirs.yaml"
    path.write_text(text)
    theirs, unresolved = read_theirs(path, arguments)
    assert not unresolved
    return convert_configuration(framework_of(theirs.tree, None, str(path)), theirs, str(path))


def value(conversion: Conversion, key: str) -> Any:
    setting = conversion.settings.get(key)
    return None if setting is None else setting.value


def loaded(tmp_path: Path, conversion: Conversion) -> Any:
    path = tmp_path / "ours.yaml"
    path.write_text(conversion_yaml(conversion, "theirs"))
    return load_config(path)


def lost(conversion: Conversion) -> str:
    return "\n".join(map(str, conversion.lost))


@pytest.mark.parametrize(("text", "expected"), [(NEMO_RL, NEMO_RL_HERE), (VERL, VERL_HERE)])
def test_values_are_what_they_mean_here(tmp_path: Path, text: str, expected: dict[str, Any]) -> None:
    conversion = converted(tmp_path, text)
    assert {key: value(conversion, key) for key in expected} == expected


def test_the_result_loads_with_these_values(tmp_path: Path) -> None:
    cfg = loaded(tmp_path, converted(tmp_path, NEMO_RL))
    assert (cfg.policy.data_parallel_size, cfg.generation.num_engines) == (4, 2)
    assert cfg.data.train[0].path == "agentica-org/DeepScaleR-Preview-Dataset"
    assert cfg.data.validation[0].prompt_key == "question"


def test_verls_files_are_sources_with_names_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    cfg = loaded(tmp_path, converted(tmp_path, VERL))
    assert cfg.policy.backend == "fsdp"
    assert [(source.name, source.path) for source in cfg.data.train] == [
        ("gsm8k", "/home/me/gsm8k/train.parquet"),
        ("math", "/home/me/math/train.parquet"),
    ]
    assert cfg.value is None


def test_what_is_missing_is_told_with_a_remedy(tmp_path: Path) -> None:
    conversion = converted(tmp_path, VERL)
    assert "over_sample_rate=0.1 is missing here" in lost(conversion)
    assert all(problem.remedy or ":" in problem.rule for problem in conversion.lost)
    assert "megatron" not in "".join(problem.key for problem in conversion.lost)  # switched off
    answers = {source["answer_key"] for source in value(conversion, "data.train")}
    assert answers == {"reward_model.ground_truth"}  # of verl's files as they are


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("actor_rollout_ref.rollout.name=sglang", "vLLM generates"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode=clip_cov", "only vanilla, gspo, sapo, cispo"),
        ("algorithm.adv_estimator=remax", "set grpo.adv_estimator.name"),
        ("actor_rollout_ref.actor.kl_loss_type=abs", "set loss_fn.reference_policy_kl_type=k3"),
        ("algorithm.use_kl_in_reward=true", "the KL is in the loss or in the reward, not in both"),
        ("data.truncation=left", "a prompt that is too long is left out"),
        ("trainer.v1.trainer_mode=colocate_async", "set it to sync, and here grpo.max_staleness=1"),
        ("+trainer.no_key_of_verl=1", ""),
    ],
)
def test_a_value_without_a_counterpart_is_named(tmp_path: Path, argument: str, expected: str) -> None:
    assert expected in lost(converted(tmp_path, VERL, argument))


def test_epochs_of_verl_end_a_run_here_too_and_steps_do_where_there_are_any(tmp_path: Path) -> None:
    given = converted(tmp_path, VERL)
    assert (value(given, "grpo.max_num_epochs"), value(given, "grpo.max_num_steps")) == (15, 100)
    decay = "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine"
    alone = converted(tmp_path, VERL, "trainer.total_training_steps=null", "trainer.total_epochs=3", decay)
    assert (value(alone, "grpo.max_num_epochs"), value(alone, "grpo.max_num_steps")) == (3, 1_000_000)
    # The decay follows the run's updates by default, whatever they come to.
    assert value(alone, "policy.scheduler.decay_style") == "cosine"
    assert "policy.scheduler.decay_updates" not in alone.settings


def test_a_loss_of_verl_is_its_keys_here(tmp_path: Path) -> None:
    mode = "+actor_rollout_ref.actor.policy_loss.loss_mode"
    gspo = converted(tmp_path, VERL, f"{mode}=gspo")
    assert value(gspo, "loss_fn.kind") == "gspo_token"  # whose gradient is that of verl's gspo
    assert value(gspo, "loss_fn.token_level_loss") is False
    assert value(gspo, "loss_fn.sequence_length_normalizer") is None
    assert value(gspo, "loss_fn.ratio_clip_c") is None
    cispo = converted(tmp_path, VERL, f"{mode}=cispo", "actor_rollout_ref.actor.clip_ratio_low=10")
    assert value(cispo, "loss_fn.kind") == "cispo"
    assert value(cispo, "loss_fn.ratio_clip_min") == 0.999
    assert "loss_fn.ratio_clip_c" not in cispo.settings
    tau = "actor_rollout_ref.actor.policy_loss.tau_pos=2"
    sapo = converted(tmp_path, VERL, f"{mode}=sapo", f"+{tau}")
    assert (value(sapo, "loss_fn.kind"), value(sapo, "loss_fn.tau_pos")) == ("sapo", 2)
    assert "loss_fn.ratio_clip_min" not in sapo.settings
    assert "loss_fn.tau_pos" not in cispo.settings


@pytest.mark.parametrize(
    ("switch", "kind"),
    [
        ("disable_ppo_ratio", "reinforce"),
        ("use_cispo", "cispo"),
        ("sequence_level_importance_ratios", "gspo"),
    ],
)
def test_a_switch_of_nemo_rl_is_a_kind_of_loss_here(tmp_path: Path, switch: str, kind: str) -> None:
    on, off = (converted(tmp_path, NEMO_RL, f"loss_fn.{switch}={value}") for value in ("true", "false"))
    assert value(on, "loss_fn.kind") == kind
    assert value(off, "loss_fn.kind") in (None, "policy_gradient")
    assert ("loss_fn.ratio_clip_max" in on.settings) == (kind != "reinforce")


def test_a_critic_comes_with_its_estimator(tmp_path: Path) -> None:
    cfg = loaded(tmp_path, converted(tmp_path, VERL, "algorithm.adv_estimator=gae", "+algorithm.lam=0.9"))
    assert cfg.value.num_epochs_per_rollout == 3
    assert (cfg.value.gae_lambda, cfg.value.optimizer.lr) == (0.9, 1.0e-5)
    assert cfg.value.bootstrap_truncated is False


def test_float16_and_8_bits_of_other_frameworks_have_keys_here(tmp_path: Path) -> None:
    fp8_cfg = "policy.megatron_cfg.fp8_cfg"
    given = (f"++{fp8_cfg}.fp8=hybrid", f"++{fp8_cfg}.fp8_recipe=tensorwise", f"++{fp8_cfg}.fp8_param=false")
    found = converted(tmp_path, NEMO_RL, "policy.precision=float16", f"++{fp8_cfg}.enabled=true", *given)
    assert value(found, "policy.precision") == "float16"
    assert value(found, "policy.megatron_cfg.fp8") == "hybrid"
    assert value(found, "policy.megatron_cfg.fp8_recipe") == "tensorwise"
    found = converted(tmp_path, NEMO_RL, f"++{fp8_cfg}.enabled=false", *given)
    assert value(found, "policy.megatron_cfg.fp8") is value(found, "policy.megatron_cfg.fp8_recipe") is None
    kept = converted(tmp_path, NEMO_RL, f"++{fp8_cfg}.enabled=true", f"++{fp8_cfg}.fp8_param=true")
    assert "weights stay in bfloat16" in lost(kept)
    of_verl = converted(tmp_path, VERL, "actor_rollout_ref.actor.fsdp_config.dtype=float16")
    assert value(of_verl, "policy.precision") == "float16"


@pytest.mark.parametrize(
    ("text", "theirs", "kind"),
    [
        (NEMO_RL, "policy.megatron_cfg.optimizer", "dist_muon"),
        (VERL, "actor_rollout_ref.actor.optim", "muon"),
    ],
)
def test_muon_of_other_frameworks_has_keys_here(tmp_path: Path, text: str, theirs: str, kind: str) -> None:
    found = converted(tmp_path, text, f"++{theirs}.optimizer={kind}", f"++{theirs}.muon_momentum=0.9")
    ours = {name: value(found, f"policy.optimizer.{name}") for name in ("kind", "muon_momentum")}
    assert ours == {"kind": "muon", "muon_momentum": 0.9}
    # Megatron-core's own values where none is given.
    assert value(found, "policy.optimizer.muon_scale") == 1.0
    assert value(found, "policy.optimizer.muon_nesterov") is False
    scaled = (f"++{theirs}.optimizer={kind}", f"++{theirs}.muon_extra_scale_factor=0.2")
    assert value(converted(tmp_path, text, *scaled), "policy.optimizer.muon_scale") == 0.2
    other = converted(
        tmp_path, text, f"++{theirs}.optimizer=adam", f"++{theirs}.muon_scale_mode=shape_scaling"
    )
    assert value(other, "policy.optimizer.muon_scale") is None
    assert "muon_scale x sqrt(max(rows, columns))" in lost(other)


def test_a_critic_gets_no_router_replay(tmp_path: Path) -> None:
    nemo = converted(tmp_path, NEMO_RL, "ppo.adv_estimator.name=gae", "value.router_replay.enabled=true")
    verl = converted(
        tmp_path,
        VERL,
        "algorithm.adv_estimator=gae",
        "critic.strategy=megatron",
        "critic.megatron.router_replay.mode=R3",
    )
    for conversion in (nemo, verl):
        assert value(conversion, "value.megatron_cfg.router_replay") is None


def test_rollouts_that_run_ahead_are_a_number_of_versions_here(tmp_path: Path) -> None:
    ahead = converted(
        tmp_path,
        NEMO_RL,
        "grpo.async_grpo={enabled: true, max_trajectory_age_steps: 2, in_flight_weight_updates: true}",
        "grpo.async_grpo.recompute_kv_cache_after_weight_updates=false",
    )
    assert value(ahead, "grpo.max_staleness") == 2
    assert value(ahead, "grpo.weight_updates") == "in_flight"
    assert value(ahead, "generation.kv_cache_after_update") == "keep"
    off = converted(tmp_path, NEMO_RL, "grpo.async_grpo.max_trajectory_age_steps=2")
    assert value(off, "grpo.max_staleness") in (None, 0)
    drained = converted(tmp_path, NEMO_RL, "grpo.async_grpo={enabled: true}")
    assert value(drained, "grpo.max_staleness") == 1


def test_an_agent_loop_of_verl_is_told_to_be_an_agent(tmp_path: Path) -> None:
    loop = "actor_rollout_ref.rollout.agent.default_agent_loop"
    assert "docs/how_to/agents.md" in lost(converted(tmp_path, VERL, f"{loop}=tool_agent"))
    assert loop not in lost(converted(tmp_path, VERL, f"{loop}=single_turn_agent"))


def test_dumped_validations_of_verl_are_dumped_here(tmp_path: Path) -> None:
    assert (
        value(converted(tmp_path, VERL, "trainer.validation_data_dir=out"), "rollout.dump_validation") is True
    )


def test_adapters_of_each_framework_train_all_linear_layers(tmp_path: Path) -> None:
    verl = converted(
        tmp_path, VERL, "actor_rollout_ref.model.lora_rank=8", "+actor_rollout_ref.model.lora_alpha=16"
    )
    assert (value(verl, "policy.lora.rank"), value(verl, "policy.lora.alpha")) == (8, 16)
    nemo = converted(
        tmp_path, NEMO_RL, "policy.megatron_cfg.peft={enabled: true, dim: 4, target_modules: []}"
    )
    assert value(nemo, "policy.lora.rank") == 4
    assert value(nemo, "policy.lora.target_modules") == ["all-linear"]


def test_nemo_rls_files_build_on_others_and_replace_groups(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "parent.yaml").write_text(NEMO_RL)
    (tmp_path / "prompt.txt").write_text("Solve {} in \\boxed{{}}.\n")
    child = """
defaults: base/parent.yaml
grpo: {max_num_steps: 7}
data:
  _override_: true
  train: {dataset_name: DeepScaler}
  validation: null
  default: {prompt_file: prompt.txt, env_name: math}
"""
    conversion = converted(tmp_path, child, "grpo.seed=9", "~cluster.num_nodes")
    assert value(conversion, "grpo.max_num_steps") == 7
    assert value(conversion, "grpo.seed") == 9
    assert value(conversion, "grpo.num_prompts_per_step") == 16
    assert value(conversion, "data.max_input_seq_length") is None  # of the group that was replaced
    assert value(conversion, "cluster.num_nodes") is None
    assert value(conversion, "data.default.prompt_template") == "Solve {prompt} in \\boxed{}."
    assert "data.validation=null is not translated" in lost(conversion)


def test_a_prompt_file_is_its_text_wherever_nemo_rl_names_it_and_never_a_path(tmp_path: Path) -> None:
    (tmp_path / "prompts").mkdir()
    (tmp_path / "prompts" / "cot.txt").write_text("Think.\n\n{}\n")
    (tmp_path / "prompts" / "system.txt").write_text("You are a teacher.\n")
    files = "prompt_file: prompts/cot.txt, system_prompt_file: prompts/system.txt"
    (tmp_path / "examples").mkdir()
    flat = converted(tmp_path / "examples", f"data: {{dataset_name: some/set, {files}}}")
    assert value(flat, "data.default.prompt_template") == "Think.\n\n{prompt}"
    assert value(flat, "data.default.system_prompt") == "You are a teacher."
    own = converted(tmp_path, f"data: {{train: {{dataset_name: DeepScaler, {files}}}}}")
    source = value(own, "data.train")
    assert source["prompt_template"] == "Think.\n\n{prompt}"
    assert source["system_prompt"] == "You are a teacher."
    missing = converted(tmp_path, "data: {system_prompt_file: prompts/none.txt}")
    assert value(missing, "data.default.system_prompt") is None
    assert "data.system_prompt_file=prompts/none.txt is not translated: there is no file" in lost(missing)
    assert "write its text into system_prompt of data.default" in lost(missing)


@pytest.mark.parametrize(
    ("theirs", "here"),
    [
        ("val_reward", "validation/reward"),
        ("val:accuracy", "validation/accuracy"),
        ("accuracy", "validation/accuracy"),
        ("train:grad_norm", "train/grad_norm"),
    ],
)
def test_a_metric_of_nemo_rl_is_one_that_exists_here(tmp_path: Path, theirs: str, here: str) -> None:
    found = converted(tmp_path, NEMO_RL, f"checkpointing.metric_name='{theirs}'")
    assert value(found, "checkpointing.metric_name") == here


def test_a_metric_that_does_not_exist_here_is_not_set(tmp_path: Path) -> None:
    found = converted(tmp_path, NEMO_RL, "checkpointing.metric_name=val_cleverness")
    assert value(found, "checkpointing.metric_name") is None
    assert "there is no metric validation/cleverness here" in lost(found)


def test_the_subset_of_a_dataset_on_the_hub_stays_one_and_a_slice_too(tmp_path: Path) -> None:
    hub = "{dataset_name: ResponseDataset, data_path: openai/gsm8k, subset: main, split: 'train[:99]'}"
    text = NEMO_RL.replace("train: {dataset_name: DeepScaler}", f"train: {hub}")
    source = value(converted(tmp_path, text), "data.train")
    assert (source["path"], source["subset"], source["split"]) == ("openai/gsm8k", "main", "train[:99]")


def test_verls_files_are_composed_by_hydra(tmp_path: Path) -> None:
    (tmp_path / "actor").mkdir()
    (tmp_path / "actor" / "dp_actor.yaml").write_text("strategy: fsdp\nppo_mini_batch_size: 8\n")
    text = """
defaults:
  - actor@actor_rollout_ref.actor: dp_actor
  - _self_
data: {train_batch_size: 32}
actor_rollout_ref: {rollout: {n: 2, prompt_length: "${oc.select:data.max_prompt_length,512}"}}
"""
    conversion = converted(tmp_path, text, "actor_rollout_ref.actor.ppo_mini_batch_size=16")
    assert value(conversion, "policy.train_global_batch_size") == 32
    assert value(conversion, "policy.backend") == "fsdp"


@pytest.mark.parametrize("text", [NEMO_RL, VERL])
def test_without_a_model_the_loader_names_it(tmp_path: Path, text: str) -> None:
    conversion = converted(tmp_path, text)
    del conversion.settings["policy.model_name"]
    with pytest.raises(ConfigError, match=r"policy\.model_name has no value"):
        loaded(tmp_path, conversion)


@pytest.mark.parametrize(
    ("text", "arguments", "expected"),
    [
        (None, [], "is not a file"),
        ("a: [1", [], "is not valid YAML"),
        ("- 1", [], "must be a mapping of keys"),
        ("x: 1", [], "has no key that is known of another framework"),
        (
            "grpo: {seed: 1}",
            ["--from", "openrlhf"],
            "is not a framework whose configurations can be converted",
        ),
        ("grpo: {seed: 1}", ["grpo.seed=1,2"], "sets several values"),
        (
            "grpo: {seed: 1}",
            ["--outptu", "mine.yaml"],
            "--outptu is an argument of TRL alone; write KEY=VALUE",
        ),
    ],
)
def test_bad_input_is_refused_with_a_message(
    tmp_path: Path, text: str | None, arguments: list[str], expected: str
) -> None:
    path = tmp_path / "theirs.yaml"
    if text is not None:
        path.write_text(text)
    command = [sys.executable, str(SCRIPT), str(path), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 2
    assert expected in done.stderr
    assert "Traceback" not in done.stderr


def test_the_script_writes_a_file_that_loads_and_lists_what_it_could_not_translate(tmp_path: Path) -> None:
    path, output = tmp_path / "theirs.yaml", tmp_path / "ours.yaml"
    path.write_text(VERL)
    command = [sys.executable, str(SCRIPT), str(path), "data.train_batch_size=128", "-o", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    assert "over_sample_rate=0.1 is missing here" in done.stderr
    assert f"{output} loads, and a run would be refused; all the rest is checked:" in done.stderr
    assert "policy.model_name=/models/seven is not a directory" in done.stderr
    assert "For a plan without weights put the model's config.json alone into that directory." in done.stderr
    assert "num_prompts_per_step: 128 # data.train_batch_size" in output.read_text()


@pytest.mark.parametrize("name", CONVERTIBLE)
def test_every_conversion_that_a_table_names_exists_and_takes_the_arguments_of_the_table(name: str) -> None:
    framework = CONVERTIBLE[name]
    for entry in framework.keys.values():
        for here in our_keys(entry):
            inspect.signature(conversion_of(framework.name, here)).bind("value", Theirs({}))


def test_every_conversion_is_named_by_a_table() -> None:
    named = {
        here.by
        for framework in CONVERTIBLE.values()
        for entry in framework.keys.values()
        for here in our_keys(entry)
    }
    defined = {
        name
        for module in (nemo_rl, nemo_rl_data, trl, values, verl)
        for name, function in vars(module).items()
        if inspect.isfunction(function) and function.__module__ == module.__name__ and name[0] != "_"
    }
    assert defined == named


def test_arguments_of_vllm_that_have_no_place_here_are_left_out_with_a_note(tmp_path: Path) -> None:
    given = "+actor_rollout_ref.rollout.engine_kwargs.vllm={max_num_seqs: 8, kv_cache_dtype: fp8}"
    found = converted(tmp_path, VERL, given)
    assert value(found, "generation.vllm_kwargs") == {"kv_cache_dtype": "fp8"}
    assert "max_num_seqs is set by generation.vllm_cfg.max_num_seqs" in str(found.notes)


def test_a_micro_batch_holds_a_whole_sample(tmp_path: Path) -> None:
    found = converted(tmp_path, VERL, "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1000")
    assert value(found, "policy.sequence_packing.train_mb_tokens") == 2000  # 500 of a prompt, 1500 more


def test_a_field_of_images_is_for_a_model_that_sees(tmp_path: Path) -> None:
    text, seeing = (
        converted(tmp_path, VERL, "+data.image_key=images", f"actor_rollout_ref.model.path=/models/{name}")
        for name in ("seven", "Seven-VL")
    )
    assert value(text, "data.default.images_key") is None
    assert value(seeing, "data.default.images_key") == "images"


def test_a_reward_function_of_verl_becomes_an_environment_that_runs_it() -> None:
    tree = {
        "reward": {"custom_reward_function": {"path": "rewards/mine.py", "reward_kwargs": {"bonus": 0.5}}}
    }
    settings = convert_configuration(CONVERTIBLE["verl"], Theirs(tree), "theirs.yaml").settings
    values = {
        key: each.value for key, each in settings.items() if key.startswith(("env.", "data.default.env"))
    }
    assert values == {
        "env.reward.kind": "function",
        "env.reward.options.function": "mine:compute_score",
        "env.reward.options.arguments": {"bonus": 0.5},
        "data.default.env": "reward",
    }


def test_changes_of_config_and_tokenizer_go_to_the_policy() -> None:
    changed = {"model_config": {"rope_theta": 5.0}, "attention_dropout": 0.1}
    model = {"path": "/models/a", "tokenizer_path": "/models/b", "override_config": changed}
    settings = convert_configuration(
        CONVERTIBLE["verl"], Theirs({"actor_rollout_ref": {"model": model}}), "theirs.yaml"
    ).settings
    assert settings["policy.tokenizer"].value == "/models/b"
    assert settings["policy.model_overrides"].value == {"rope_theta": 5.0, "attention_dropout": 0.1}
    tree = {"policy": {"model_name": "a", "tokenizer": {"name": "b"}, "hf_config_overrides": {"x": 1}}}
    settings = convert_configuration(CONVERTIBLE["nemo_rl"], Theirs(tree), "theirs.yaml").settings
    assert settings["policy.tokenizer"].value == "b"
    assert settings["policy.model_overrides"].value == {"x": 1}


def test_code_that_verl_trusts_for_any_model_of_the_run_is_trusted_by_one_switch() -> None:
    def converted(estimator: str, **critic: Any) -> dict[str, Any]:
        model = {"trust_remote_code": False, "external_lib": "models.own"}
        tree = {
            "algorithm": {"adv_estimator": estimator},
            "actor_rollout_ref": {"model": model},
            "critic": {"model": critic},
        }
        settings = convert_configuration(CONVERTIBLE["verl"], Theirs(tree), "theirs.yaml").settings
        return {name: settings[f"policy.{name}"].value for name in ("trust_remote_code", "external_lib")}

    critic = {"trust_remote_code": True, "external_lib": ["models.own", "models.critic"]}
    both = {"trust_remote_code": True, "external_lib": ["models.own", "models.critic"]}
    assert converted("gae", **critic) == both
    assert converted("grpo", **critic) == {"trust_remote_code": False, "external_lib": ["models.own"]}
    assert converted("gae", external_lib=None)["external_lib"] == ["models.own"]


def test_a_reward_model_of_verl_judges_alone_and_not_beside_a_function() -> None:
    model = {"reward_model": {"enable": True, "model": {"path": "/models/judge"}}}
    alone = convert_configuration(CONVERTIBLE["verl"], Theirs(model), "theirs.yaml").settings
    assert (alone["env.judge.kind"].value, alone["data.default.env"].value) == ("reward_model", "judge")
    assert alone["env.judge.options.model_name"].value == "/models/judge"
    both = {**model, "custom_reward_function": {"path": "mine.py", "name": "score"}}
    found = convert_configuration(CONVERTIBLE["verl"], Theirs(both), "theirs.yaml")
    assert found.settings["env.reward.options.function"].value == "mine:score"
    assert "env.judge.kind" not in found.settings
    assert "reward_model.enable=true" in str([problem.key for problem in found.lost])


def test_what_only_a_reader_can_translate_is_left_with_its_remedy() -> None:
    tree = {
        "actor_rollout_ref": {
            "rollout": {"multi_turn": {"enable": True}, "agent": {"default_agent_loop": None}}
        }
    }
    found = convert_configuration(CONVERTIBLE["verl"], Theirs(tree), "theirs.yaml")
    (problem,) = found.lost
    assert problem.key.startswith("actor_rollout_ref.rollout.multi_turn.enable")
    assert "turns and tools belong to an environment" in str(problem)


def test_a_chat_template_is_a_file() -> None:
    def of(template: str) -> tuple[Any, str]:
        tree = {"policy": {"tokenizer": {"chat_template": template}}}
        found = convert_configuration(CONVERTIBLE["nemo_rl"], Theirs(tree), "theirs.yaml")
        setting = found.settings.get("data.chat_template")
        return setting and setting.value, str(found.lost)

    assert of("chat.jinja")[0] == "chat.jinja" and of("default") == (None, "[]")
    assert "write the template into a file" in of("{{ messages }}")[1]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"gae_lambda": 0.95}),
        ({"gae_lambda_value": 1.0}, {"gae_lambda": 1.0, "gae_lambda_policy": 0.95}),
        ({"gae_lambda_policy": 0.9}, {"gae_lambda": 0.95, "gae_lambda_policy": 0.9}),
        (
            {"gae_lambda_value": 1.0, "length_adaptive_alpha": 0.05},
            {"gae_lambda": 1.0, "gae_length_adaptive_alpha": 0.05},
        ),
    ],
)
def test_the_lambdas_of_policy_and_critic_keep_their_meaning(
    tmp_path: Path, given: dict[str, float], expected: dict[str, float]
) -> None:
    arguments = [f"ppo.adv_estimator.{name}={number}" for name, number in given.items()]
    estimator = ("ppo.adv_estimator.name=gae", "ppo.adv_estimator.gae_lambda=0.95")
    found = converted(tmp_path, NEMO_RL, *estimator, *arguments)
    lambdas = {key.removeprefix("value."): value(found, key) for key in found.settings if "gae_l" in key}
    assert {key: number for key, number in lambdas.items() if number is not None} == expected


@pytest.mark.parametrize(("metric", "part"), [("acc", None), ("seq_reward", None), ("format", "format")])
def test_a_metric_by_which_groups_are_filtered_is_a_part_of_the_reward(
    tmp_path: Path, metric: str, part: str | None
) -> None:
    chosen = (f"algorithm.filter_groups.metric={metric}", "algorithm.filter_groups.enable=true")
    assert value(converted(tmp_path, VERL, *chosen), "grpo.dynamic_sampling_component") == part


def test_the_first_rows_of_a_file_are_a_slice_of_it(tmp_path: Path) -> None:
    train = value(
        converted(tmp_path, VERL, "data.train_files=a.parquet", "data.train_max_samples=9"), "data.train"
    )
    assert train["split"] == "train[:9]"
    several = converted(tmp_path, VERL, "data.train_files=[a.parquet,b.parquet]", "data.train_max_samples=9")
    assert "of several files each has rows of its own" in lost(several)


def test_a_run_of_nemo_rl_ends_with_its_epochs_or_its_steps(tmp_path: Path) -> None:
    found = converted(tmp_path, NEMO_RL, "grpo.max_num_epochs=2")
    assert (value(found, "grpo.max_num_epochs"), value(found, "grpo.max_num_steps")) == (2, 30)


def test_models_beside_checkpoints_are_models_beside_checkpoints(tmp_path: Path) -> None:
    key, contents = "checkpointing.export_hf", "+actor_rollout_ref.actor.checkpoint.save_contents"
    assert value(converted(tmp_path, VERL, f"{contents}=[model,optimizer,extra,hf_model]"), key) is True
    assert value(converted(tmp_path, VERL, f"{contents}=[model,optimizer,extra]"), key) is False
    assert value(converted(tmp_path, NEMO_RL, "checkpointing.save_consolidated=true"), key) is True


@pytest.mark.parametrize(
    ("contents", "parts"),
    [
        ("[model]", "weights"),
        ("[model,optimizer]", "weights_and_optimizer"),
        ("[model,optimizer,extra]", "all"),
        ("[optimizer]", None),
    ],
)
def test_what_is_loaded_of_a_checkpoint_is_what_is_taken(
    tmp_path: Path, contents: str, parts: str | None
) -> None:
    key, given = "checkpointing.resume_parts", f"+actor_rollout_ref.actor.checkpoint.load_contents={contents}"
    path = "+trainer.resume_from_path=/runs/global_step_5"
    found = converted(tmp_path, VERL, given, path)
    assert value(found, key) == parts
    assert ("set checkpointing.resume_parts" in lost(found)) == (parts is None)
    assert key not in converted(tmp_path, VERL, given).settings


def test_adapters_of_a_critic_are_adapters_of_the_critic(tmp_path: Path) -> None:
    theirs = ("algorithm.adv_estimator=gae", "+critic.model.lora_rank=8", "+critic.model.lora_alpha=16")
    found = converted(tmp_path, VERL, *theirs, "+critic.model.target_modules=[q_proj,v_proj]")
    keys = ("enabled", "rank", "alpha", "target_modules")
    assert [value(found, f"value.lora.{key}") for key in keys] == [True, 8, 16, ["q_proj", "v_proj"]]
    without = converted(tmp_path, VERL, theirs[0], "+critic.model.lora_rank=0", theirs[2])
    assert [value(without, f"value.lora.{key}") for key in keys] == [False, None, None, None]
    lora = "++value.dtensor_cfg.lora_cfg={enabled: true, dim: 4, target_modules: []}"
    nemo_rl = converted(tmp_path, NEMO_RL, "++ppo.adv_estimator.name=gae", lora)
    assert [value(nemo_rl, f"value.lora.{key}") for key in keys] == [True, 4, None, ["all-linear"]]


def test_rollouts_of_dynamic_sampling_have_the_prompts_that_they_have_there(tmp_path: Path) -> None:
    key = "grpo.dynamic_sampling_num_prompts"
    theirs = ("grpo.use_dynamic_sampling=true", "grpo.num_prompts_per_step=64", "grpo.batch_multiplier=3")
    assert value(converted(tmp_path, NEMO_RL, *theirs), key) == 192
    assert key not in converted(tmp_path, NEMO_RL, "grpo.batch_multiplier=3").settings
    chosen = ("data.train_batch_size=256", "data.gen_batch_size=768")
    filters = "algorithm.filter_groups.enable=true"
    assert value(converted(tmp_path, VERL, *chosen, filters), key) == 768
    assert key not in converted(tmp_path, VERL, *chosen).settings


def test_an_engines_experts_are_divided_over_all_its_gpus_or_not_at_all(tmp_path: Path) -> None:
    key = "generation.vllm_kwargs.enable_expert_parallel"
    group = "policy.generation.vllm_cfg"
    for parts, expected in ((1, None), (4, True)):
        divided = (f"{group}.tensor_parallel_size=4", f"{group}.expert_parallel_size={parts}")
        settings = converted(tmp_path, NEMO_RL, *divided).settings
        assert (settings[key].value if key in settings else None) == expected
    found = converted(tmp_path, NEMO_RL, f"{group}.tensor_parallel_size=4", f"{group}.expert_parallel_size=8")
    assert "over the 4 GPUs of an engine or not at all" in str(found.lost)


def test_an_engine_that_is_larger_than_a_node_is_spread_over_nodes(tmp_path: Path) -> None:
    key, group = "generation.vllm_cfg.num_nodes", "policy.generation.vllm_cfg"
    assert key not in converted(tmp_path, NEMO_RL, f"{group}.tensor_parallel_size=8").settings
    large = (f"{group}.tensor_parallel_size=8", f"{group}.pipeline_parallel_size=2", "cluster.num_nodes=4")
    assert value(converted(tmp_path, NEMO_RL, *large), key) == 2


def test_adapters_of_verls_megatron_have_the_names_of_transformers(tmp_path: Path) -> None:
    group = "actor_rollout_ref.model.lora"
    found = converted(
        tmp_path, VERL, f"{group}.rank=8", f"{group}.alpha=32", f"{group}.target_modules=[linear_qkv]"
    )
    assert (value(found, "policy.lora.enabled"), value(found, "policy.lora.rank")) == (True, 8)
    assert value(found, "policy.lora.target_modules") == ["q_proj", "k_proj", "v_proj"]


def test_further_sampling_arguments_of_trl_are_keys_or_lost(tmp_path: Path) -> None:
    tree = {"generation_kwargs": {"top_k": 0, "min_p": 0.1, "stop": ["\n"]}}
    settings = convert_configuration(CONVERTIBLE["trl"], Theirs(tree), "theirs.yaml").settings
    assert settings["generation.top_k"].value is None
    assert settings["generation.min_p"].value == 0.1
    assert settings["generation.stop_strings"].value == ["\n"]
    lost = convert_configuration(
        CONVERTIBLE["trl"], Theirs({"generation_kwargs": {"presence_penalty": 1.0}}), "theirs.yaml"
    ).lost
    assert "presence_penalty has no key here" in str(lost[0])


def test_a_revision_of_a_model_is_downloaded_or_named() -> None:
    theirs = Theirs({"model_name_or_path": "Qwen/Qwen3-8B", "model_revision": "v1"})
    (note,) = convert_configuration(CONVERTIBLE["trl"], theirs, "theirs.yaml").notes
    assert "hf download Qwen/Qwen3-8B --revision v1 --local-dir models/Qwen3-8B" in str(note)
    assert str(note).endswith("or write Qwen/Qwen3-8B@v1")


@pytest.mark.parametrize(
    ("size", "paths", "train", "held_out"),
    [
        (None, ["a"], ["train"], ["train"]),
        (0.01, ["a", "b"], ["train[:99%]"] * 2, ["train[99%:]"] * 2),
        (50, ["a"], ["train[:-50]"], ["train[-50:]"]),
    ],
)
def test_a_mixture_holds_the_ends_of_its_sources_out(
    size: float | None, paths: list[str], train: list[str], held_out: list[str]
) -> None:
    tree = {"datasets": [{"path": path} for path in paths], "test_split_size": size}
    settings = convert_configuration(CONVERTIBLE["trl"], Theirs(tree), "theirs.yaml").settings
    for key, expected in {"data.train": train, "data.validation": held_out}.items():
        sources = settings[key].value
        assert [one["split"] for one in (sources if isinstance(sources, list) else [sources])] == expected


@pytest.mark.parametrize("size", [0.015, 50])
def test_a_size_that_no_slice_of_each_source_has_is_lost(size: float) -> None:
    tree = {"datasets": [{"path": "a"}, {"path": "b"}], "test_split_size": size}
    lost = convert_configuration(CONVERTIBLE["trl"], Theirs(tree), "theirs.yaml").lost
    assert "is no whole per cent of each source" in str(lost[0])


def test_penalties_of_nemo_rl_for_the_form_of_responses_are_keys_here(tmp_path: Path) -> None:
    text = """
    grpo: {num_prompts_per_step: 8, malformed_thinking_advantage: -5.0, invalid_tool_call_advantage: -4.0}
    reward_penalties:
      penalize_duplicated_reasoning: true
      penalize_empty_final_answer: false
      penalize_malformed_think_tag: true
      penalize_unwanted_tokens: true
      token_ids: {unwanted: [2]}
    env: {nemo_gym: {thinking_tags: ["<t>", "</t>"], invalid_tool_call_patterns: null}}
    """
    conversion = converted(tmp_path, text)
    assert value(conversion, "loss_fn.malformed_thinking_advantage") == -5.0
    assert value(conversion, "loss_fn.invalid_tool_call_advantage") == -4.0
    assert value(conversion, "rollout.no_reward_for") == ["repeated_thinking", "malformed_thinking"]
    assert value(conversion, "rollout.thinking_marks") == ["<t>", "</t>"]
    assert value(conversion, "rollout.tool_call_marks") is None
    assert "reward_penalties.penalize_unwanted_tokens=true" in lost(conversion)
    assert "reward_penalties.penalize_empty_final_answer" not in lost(conversion)


def test_an_answer_that_dapo_s_comparison_looks_for_is_looked_for_here(tmp_path: Path) -> None:
    text = (
        "grpo: {num_prompts_per_step: 8}\nenv: {math: {num_workers: 2, math_verify_impl: dapo_math_verify}}\n"
    )
    conversion = converted(tmp_path, text)
    pattern = value(conversion, "env.math.options.answer_pattern")
    assert extract_answer("Answer: 3\nso\nanswer : 4 apples\n.", pattern) == "4 apples"
    assert any("not by its normalised text" in str(note) for note in conversion.notes)
    other = converted(tmp_path, text.replace("dapo_math_verify", "mine"))
    assert "mine is no comparison that is known here" in lost(other)


def test_a_reference_is_renewed_in_steps_where_trl_counts_updates() -> None:
    batch = {"per_device_train_batch_size": 8, "num_processes": 1, "steps_per_generation": 4}
    tree = {**batch, "sync_ref_model": True, "ref_model_sync_steps": 64, "ref_model_mixup_alpha": 0.9}
    settings = convert_configuration(CONVERTIBLE["trl"], Theirs(tree), "theirs.yaml").settings
    assert settings["loss_fn.reference_policy_sync_steps"].value == 16
    assert settings["loss_fn.reference_policy_sync_weight"].value == 0.9
    off = convert_configuration(CONVERTIBLE["trl"], Theirs({"sync_ref_model": False}), "theirs.yaml")
    assert off.settings["loss_fn.reference_policy_sync_steps"].value is None
