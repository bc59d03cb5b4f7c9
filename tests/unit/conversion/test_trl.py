"""Configurations in the style of TRL's command line, and what they are here, worked out by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from nemo_like_tools.conversion.their_files import read_theirs
from nemo_like_tools.conversion.translation import (
    CONVERTIBLE,
    Conversion,
    convert_configuration,
    framework_of,
)
from nemo_like_tools.conversion.values import Theirs
from nemo_like_tools.conversion.writing import conversion_yaml

TRL = """
model_name_or_path: Some/Model-1B
dataset_name: owner/problems
dataset_config: main
reward_funcs: [accuracy_reward, think_format_reward]
reward_weights: [1.0, 0.2]
per_device_train_batch_size: 4
gradient_accumulation_steps: 2
steps_per_generation: 8
num_generations: 16
num_iterations: 2
max_completion_length: 1024
max_steps: 80
save_steps: 10
eval_strategy: steps
eval_steps: 24
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr_rate: 0.1}
warmup_ratio: 0.05
epsilon_high: 0.28
use_vllm: true
use_peft: true
save_total_limit: 3
report_to: [wandb]
"""

TRL_HERE: dict[str, Any] = {
    "grpo.num_prompts_per_step": 8,  # 4 x 4 processes x 8 are 128 samples, in groups of 16
    "grpo.num_generations_per_prompt": 16,
    "grpo.num_epochs_per_rollout": 2,
    "grpo.max_num_steps": 10,  # a step has 128 / 32 updates, each twice: 80 / 8
    "grpo.val_period": 3,  # 24 / 8
    "grpo.normalize_rewards": True,
    "loss_fn.reference_policy_kl_penalty": 0.0,
    "loss_fn.token_level_loss": True,
    "loss_fn.ratio_clip_min": 0.2,
    "loss_fn.ratio_clip_max": 0.28,
    "loss_fn.use_importance_sampling_correction": True,
    "policy.model_name": "models/Model-1B",
    "policy.backend": "fsdp",
    "policy.data_parallel_size": 4,
    "policy.train_global_batch_size": 32,
    "policy.train_micro_batch_size": 4,
    "policy.max_total_sequence_length": 1536,
    "policy.scheduler.decay_style": "cosine",
    "policy.scheduler.decay_updates": 80,
    "policy.scheduler.min_lr": pytest.approx(1e-7),
    "policy.scheduler.warmup_updates": 4,  # a twentieth of 80
    "policy.lora.enabled": True,
    "policy.lora.rank": 16,
    "policy.lora.target_modules": ["q_proj", "v_proj"],
    "generation.num_engines": 4,
    "generation.top_k": None,
    "cluster.placement": "colocated",
    "cluster.gpus_per_node": 4,
    "checkpointing.save_period": 2,  # 10 / 8, rounded up
    "checkpointing.keep_top_k": 2,  # besides the latest
    "data.default.env": "all",
    "env.all.options": {"components": {"math": 1.0, "format": 0.2}},
    "env.format.kind": "regex",
    "logger.wandb.mode": "online",
    "data.validation": {
        "kind": "huggingface",
        "split": "test",
        "path": "owner/problems",
        "subset": "main",
        "prompt_key": "prompt",
        "answer_key": "solution",
    },
}


def converted(tmp_path: Path, text: str, *arguments: str, name: str = "grpo.yaml") -> Conversion:
    path = tmp_path / name
    path.write_text(text)
    theirs, unresolved = read_theirs(path, arguments)
    assert not unresolved
    return convert_configuration(framework_of(theirs.tree, None, str(path)), theirs, str(path))


def values(conversion: Conversion) -> dict[str, Any]:
    return {key: setting.value for key, setting in conversion.settings.items()}


def lost(conversion: Conversion) -> str:
    return "\n".join(map(str, conversion.lost))


def test_values_are_what_they_mean_here(tmp_path: Path) -> None:
    found = values(converted(tmp_path, TRL, "--num_processes", "4"))
    assert {key: found.get(key) for key in TRL_HERE} == TRL_HERE


def test_a_script_gives_the_processes_the_file_and_the_last_word(tmp_path: Path) -> None:
    (tmp_path / "grpo.yaml").write_text(TRL)
    text = (
        "accelerate launch --num_processes 2 my_grpo.py --config grpo.yaml --max-steps=16 --temperature 0.7\n"
    )
    found = values(converted(tmp_path, text, "--learning_rate", "2e-6", name="run.sh"))
    assert found["policy.data_parallel_size"] == 2
    assert found["grpo.max_num_steps"] == 2
    assert (found["generation.temperature"], found["policy.optimizer.lr"]) == (0.7, 2e-6)


def test_what_is_unsaid_has_trls_defaults_and_the_result_lists_them(tmp_path: Path) -> None:
    found = converted(tmp_path, TRL)
    assert found.assumed["num_processes"] == 8
    assert "per_device_train_batch_size" not in found.assumed
    text = conversion_yaml(found, "TRL", "grpo.yaml")
    assert "\n#   epsilon=0.2\n" in text
    assert "ratio_clip_min: 0.2 # epsilon by default\n" in text
    assert text.index("  - env@env.format: regex") < text.index("  - override policy: fsdp")


def test_a_mixture_is_a_list_of_sources_with_weights(tmp_path: Path) -> None:
    text = """
reward_funcs: accuracy_reward
datasets:
  - {path: owner/one, name: main, fraction: 0.75}
  - {path: owner/two, split: 'train[:100]', fraction: 0.25}
"""
    first, second = values(converted(tmp_path, text))["data.train"]
    assert (first["path"], first["subset"], first["weight"]) == ("owner/one", "main", 0.75)
    assert (second["split"], second["weight"], second["answer_key"]) == ("train[:100]", 0.25, "solution")


@pytest.mark.parametrize(
    ("loss", "kind", "expected"),
    [
        ("loss_type=grpo", "policy_gradient", {"token_level_loss": False}),
        ("loss_type=dr_grpo", "policy_gradient", {"sequence_length_normalizer": 1024}),
        ("importance_sampling_level=sequence", "gspo", {"token_level_loss": True}),
        ("loss_type=cispo", "cispo", {"ratio_clip_min": 0.999, "ratio_clip_max": 4.0}),
        ("loss_type=sapo", "sapo", {"token_level_loss": False}),
    ],
)
def test_a_loss_of_trl_is_its_keys_here(
    tmp_path: Path, loss: str, kind: str, expected: dict[str, Any]
) -> None:
    found = values(converted(tmp_path, TRL, loss, "epsilon_high=5.0"))
    assert found["loss_fn.kind"] == kind
    assert {key: found[f"loss_fn.{key}"] for key in expected} == expected


def test_a_server_has_gpus_beside_the_training_or_a_node(tmp_path: Path) -> None:
    beside = values(converted(tmp_path, TRL, "vllm_mode=server", "num_processes=4"))
    assert (beside["cluster.gpus_per_node"], beside["generation.num_engines"]) == (5, 1)
    assert (beside["cluster.num_nodes"], beside["cluster.placement"]) == (1, "separate")
    apart = values(converted(tmp_path, TRL, "vllm_mode=server", "vllm_tensor_parallel_size=2"))
    assert (apart["cluster.num_nodes"], apart["cluster.gpus_per_node"]) == (2, 8)
    assert (apart["generation.num_engines"], apart["cluster.address"]) == (4, "auto")


def test_a_reward_model_is_an_environment(tmp_path: Path) -> None:
    model = "reward_model_name_or_path=Some/Reward"
    alone = values(converted(tmp_path, TRL, model, "reward_funcs=null", "reward_weights=null"))
    assert (alone["env.quality.kind"], alone["data.default.env"]) == ("reward_model", "quality")
    assert alone["env.quality.options"]["model_name"] == "models/Reward"
    both = values(converted(tmp_path, TRL, model, "reward_funcs=accuracy_reward", "reward_weights=[1,2]"))
    assert both["env.all.options"] == {"components": {"quality": 1.0, "math": 2.0}}


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("reward_funcs=my.rewards.cleverness", "my.rewards.cleverness is Python of yours, and math judges"),
        ("num_generations=24", "128 samples are no whole groups of 24; set grpo.num_prompts_per_step"),
        ("max_steps=-1 warmup_ratio=0.1", "give max_steps=N, or set policy.scheduler.warmup_updates"),
        ("loss_type=vespo", "write the loss as loss_fn.kind=package.module:name"),
        ("scale_rewards=batch", "set grpo.normalize_rewards"),
        ("lr_scheduler_type=polynomial", "set policy.scheduler.decay_style"),
        ("load_in_4bit=true", "set policy.lora.enabled for less memory"),
        ("vllm_importance_sampling_mode=sequence_truncate", "docs/reference/conventions.md"),
        ("save_strategy=epoch", "a period counts steps; set it to a number"),
    ],
)
def test_a_value_without_a_counterpart_is_named(tmp_path: Path, argument: str, expected: str) -> None:
    assert expected in lost(converted(tmp_path, TRL, "num_processes=4", *argument.split()))


def test_epochs_end_a_run_without_max_steps(tmp_path: Path) -> None:
    found = values(converted(tmp_path, TRL, "num_processes=4", "max_steps=-1", "num_train_epochs=0.5"))
    assert (found["grpo.max_num_epochs"], found["grpo.max_num_steps"]) == (0.5, 1_000_000)
    assert found["checkpointing.export_hf"] is True  # of which TRL makes its checkpoints
    assert found["policy.scheduler.decay_style"] == "cosine"
    assert "policy.scheduler.decay_updates" not in found  # the default follows the run
    assert "grpo.max_num_epochs" not in values(converted(tmp_path, TRL, "num_train_epochs=2"))


def test_a_share_of_the_run_warms_up_where_the_problems_can_be_counted(tmp_path: Path) -> None:
    lines, rows = tmp_path / "a.jsonl", tmp_path / "b.parquet"
    lines.write_text('{"prompt": "1"}\n' * 17 + "\n")
    parquet.write_table(pyarrow.table({"prompt": ["2"] * 17}), rows)
    epochs = ("num_processes=4", "max_steps=-1", "num_train_epochs=5", "warmup_ratio=0.1")
    for path in (lines, rows):
        found = values(converted(tmp_path, TRL, *epochs, f"dataset_name={path}"))
        # 5 epochs of 2 whole steps of 8 of the 17 problems, each of 4 updates in 2 passes, are 80 updates.
        assert found["policy.scheduler.warmup_updates"] == 8


def test_a_regular_expression_of_vllm_is_the_grammar_of_responses() -> None:
    found = convert_configuration(
        CONVERTIBLE["trl"], Theirs({"vllm_structured_outputs_regex": "[0-9]+"}), "grpo.yaml"
    )
    assert found.settings["generation.structured_outputs"].value == {"regex": "[0-9]+"}
