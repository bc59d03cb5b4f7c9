"""Files of an earlier version: what runs of then left in ``config.yaml`` loads as what it is now."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from nemo_like.config.earlier_keys import note, with_todays_keys
from nemo_like.config.loader import to_dict
from nemo_like.config.problems import ConfigError
from nemo_like.configuration import load_config

CONFIGS = Path(__file__).parents[3] / "configs"
EARLIER = sorted((Path(__file__).parent / "earlier_runs").iterdir())

# What these configurations have set to another value since.
SINCE = {
    "grpo_agent_cpu": (
        *("vars.model_seed=1", "grpo.max_num_steps=30"),
        *("policy.optimizer.lr=1.0e-3", "policy.scheduler.decay_updates=120"),
    )
}


@pytest.mark.parametrize("config", EARLIER, ids=lambda path: path.stem)
def test_the_configuration_that_an_earlier_run_left_is_that_of_such_a_run_now(config: Path) -> None:
    assert to_dict(load_config(config)) == to_dict(
        load_config(CONFIGS / config.name, SINCE.get(config.stem, ()))
    )


# Keys that the configurations of earlier runs do not have, with their defaults.
EXCERPTS = {
    "rollout.excerpt_period": 10, "rollout.excerpt_samples": 32, "rollout.excerpt_validation_samples": 64,
}  # fmt: skip
STAGES = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
SCALING = {
    "initial_loss_scale": 65536.0,
    "loss_scale_window": 1000,
    "min_loss_scale": 1.0,
    "hysteresis": 1,
    "max_skipped_updates": 20,
}
MUON = {"kind": "adamw", "muon_momentum": 0.95, "muon_nesterov": True, "muon_ns_steps": 5, "muon_scale": 0.2}
CHUNKS = "virtual_pipeline_model_parallel_size"
NEWER = {
    "checkpointing.resume_from_path": None,
    "debug.find_mismatch": True,
    "grpo.advantage_clip_low": None,
    "grpo.advantage_clip_high": None,
    "grpo.dynamic_sampling_component": None,
    "grpo.dynamic_sampling_num_prompts": None,
    "grpo.val_start_at": 0,
    "loss_fn.entropy_target": None,
    "loss_fn.entropy_coef_delta": 0.005,
    "loss_fn.entropy_coef_min": 0.0,
    "loss_fn.entropy_coef_max": 1.0,
    "loss_fn.use_on_policy_kl_approximation": False,
    "loss_fn.reference_policy_sync_steps": None,
    "loss_fn.reference_policy_sync_weight": 0.6,
    "loss_fn.off_policy_mask_threshold": None,
    "loss_fn.top_entropy_quantile": 1.0,
    "loss_fn.positive_example_nll_weight": 0.0,
    "loss_fn.invalid_tool_call_advantage": None,
    "loss_fn.malformed_thinking_advantage": None,
    "rollout.no_reward_for": [],
    "rollout.tool_call_marks": ["<tool_call>", "</tool_call>", "<function_call>", "</function_call>"],
    "rollout.thinking_marks": ["<think>", "</think>"],
    "data.default.chat_template_kwargs": {},
    "generation.structured_outputs": {},
    "generation.vllm_cfg.pipeline_parallel_size": 1,
    "generation.vllm_cfg.num_nodes": 1,
    "generation.validation.structured_outputs": None,
    "env.arithmetic.sampling.structured_outputs": None,
    "env.arithmetic.validation_sampling.structured_outputs": None,
    "grpo.max_num_epochs": None,
    "checkpointing.export_hf": False,
    "checkpointing.resume_parts": "all",
    "policy.tokenizer": None,
    "policy.trust_remote_code": False,
    "policy.external_lib": [],
    "policy.model_overrides": {},
    "policy.lora.exclude_modules": [],
    "policy.lora.use_rslora": False,
    "policy.lora.adapter_path": None,
    **{f"policy.megatron_cfg.{name}": None for name in (*STAGES, CHUNKS)},
    "policy.megatron_cfg.freeze_moe_router": False,
    "policy.megatron_cfg.optimizer_cpu_offload": False,
    "policy.fsdp_cfg.context_parallel_size": 1,
    "policy.megatron_cfg.expert_tensor_parallel_size": 1,
    "policy.loss_scaling": SCALING,
    **{f"policy.optimizer.{name}": value for name, value in MUON.items()},
    "policy.megatron_cfg.fp8": None,
    "policy.megatron_cfg.fp8_recipe": "blockwise",
}
NEWER_OF_TEACHERS = {
    "teacher.fsdp_cfg.context_parallel_size": "${policy.fsdp_cfg.context_parallel_size}",
    "teacher.megatron_cfg.expert_tensor_parallel_size": "${policy.megatron_cfg.expert_tensor_parallel_size}",
    "teacher.model_overrides": {},
    **{f"teacher.megatron_cfg.{name}": f"${{policy.megatron_cfg.{name}}}" for name in (*STAGES, CHUNKS)},
}
NEWER_OF_CRITICS = {
    "value.gae_lambda_policy": None,
    "value.gae_length_adaptive_alpha": None,
    "value.model_overrides": {},
    **{f"value.megatron_cfg.{name}": None for name in (*STAGES, CHUNKS)},
    "value.megatron_cfg.freeze_moe_router": False,
    "value.megatron_cfg.optimizer_cpu_offload": False,
    "value.fsdp_cfg.context_parallel_size": 1,
    "value.megatron_cfg.expert_tensor_parallel_size": 1,
    "value.loss_scaling": SCALING,
    **{f"value.optimizer.{name}": value for name, value in MUON.items()},
    "value.megatron_cfg.fp8": None,
    "value.megatron_cfg.fp8_recipe": "blockwise",
    "value.lora.exclude_modules": [],
    "value.lora.use_rslora": False,
    "value.lora.adapter_path": None,
}


def test_what_is_read_otherwise_is_told_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes((Path(__file__).parent / "earlier_runs" / "distill_arithmetic_cpu.yaml").read_bytes())
    note.cache_clear()
    for _ in range(2):
        load_config(path)
    frozen, routers, *told = capsys.readouterr().err.splitlines()
    assert frozen.startswith(
        f"note: {path}: of an earlier version, left out since a teacher does not train: "
    )
    assert "teacher.lora, " in frozen and frozen.count("teacher.") == 15
    assert routers.endswith("with the policy's routers: teacher.megatron_cfg.router_replay")
    defaults = {"logger.own": {}, **EXCERPTS, **NEWER, **NEWER_OF_TEACHERS}
    newer, of_loss = told[: len(defaults)], told[len(defaults) :]
    assert sorted(newer) == sorted(
        f"note: {path}: {key} is newer than this file, and has its default, {default}"
        for key, default in defaults.items()
    )
    names = ("divergence", "top_k", "weight", "reward_weight")
    assert of_loss == [f"note: loss_fn.arguments.{name} is now loss_fn.{name}" for name in names]


def test_a_key_with_another_name_now_keeps_its_value_unless_the_file_has_that_name_too() -> None:
    earlier = {"cluster": {"num_gpus": 4, "num_nodes": 2}}
    assert with_todays_keys(earlier, "x.yaml") == {"cluster": {"gpus_per_node": 4, "num_nodes": 2}}
    both = {"cluster": {"num_gpus": 4, "gpus_per_node": 8}}
    assert with_todays_keys(both, "y.yaml") == {"cluster": {"gpus_per_node": 8}}
    assert earlier == {"cluster": {"num_gpus": 4, "num_nodes": 2}}


def test_an_argument_by_an_earlier_name_is_an_error_that_names_todays() -> None:
    arguments = ["teacher=default", "teacher.model_name=here", "teacher.optimizer.lr=1"]
    with pytest.raises(
        ConfigError, match=r"earlier version's teacher\.optimizer has no effect here: a teach"
    ):
        load_config(CONFIGS / "grpo_arithmetic_cpu.yaml", arguments)


def test_the_fixtures_are_whole_configurations() -> None:
    assert len(EARLIER) == 5
    for path in EARLIER:
        assert "defaults" not in yaml.safe_load(path.read_text())


def test_a_key_that_is_newer_than_a_runs_configuration_has_its_default(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.yaml"
    earlier = yaml.safe_load((EARLIER[0].parent / "ppo_arithmetic_cpu.yaml").read_text())
    earlier["logger"]["own"] = {}
    del earlier["grpo"]["max_staleness"]
    del earlier["value"]["megatron_cfg"]["moe_grouped_gemm"]
    del earlier["env"]["arithmetic"]["check_at_start"]
    path.write_text(yaml.safe_dump(earlier))
    cfg = load_config(path, ["policy.megatron_cfg.moe_grouped_gemm=true"])
    assert cfg.grpo.max_staleness == 0 and cfg.env["arithmetic"].check_at_start
    assert cfg.value is not None and cfg.value.megatron_cfg.moe_grouped_gemm  # follows the policy's
    assert cfg.value.gae_lambda == earlier["value"]["gae_lambda"] == 1.0  # not the default
    told = capsys.readouterr().err
    assert f"note: {path}: grpo.max_staleness is newer than this file, and has its default, 0" in told
    assert told.count(f"note: {path}: rollout.excerpt_") == len(EXCERPTS)
    assert told.count("note: ") == 3 + len(EXCERPTS) + len(NEWER) + len(NEWER_OF_CRITICS)


def test_a_key_without_a_default_and_a_missing_group_stay_errors(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    earlier = yaml.safe_load((EARLIER[0].parent / "grpo_arithmetic_cpu.yaml").read_text())
    path.write_text(yaml.safe_dump({**earlier, "policy": {**earlier["policy"], "model_name": "???"}}))
    with pytest.raises(ConfigError, match=r"policy\.model_name has no value"):
        load_config(path)
    del earlier["rollout"], earlier["grpo"]["max_staleness"]
    path.write_text(yaml.safe_dump(earlier))
    with pytest.raises(ConfigError, match=r"names no file to build on, and lacks rollout"):
        load_config(path)
    (tmp_path / "above.yaml").write_text("defaults: [config]")
    with pytest.raises(ConfigError, match=r"(?s)grpo\.max_staleness has no value.*rollout has no value"):
        load_config(tmp_path / "above.yaml")
