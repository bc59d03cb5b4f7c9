from __future__ import annotations

from pathlib import Path

import pytest

from nemo_like.config import fields
from nemo_like.config.other_frameworks import (
    FRAMEWORKS,
    Always,
    Missing,
    NoEffect,
    known_name,
    our_keys,
    table_of,
)
from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config, load_config

DEMO = Path(__file__).parents[3] / "configs" / "grpo_arithmetic_cpu.yaml"


def message(*overrides: str, path: Path = DEMO) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_name_leads_to_a_key_that_exists_and_one_of_both_changes_its_value(framework: str) -> None:
    for name, entry in table_of(framework).keys.items():
        for here in our_keys(entry):
            assert fields.find(Config, here.key) is not None, name
        if isinstance(entry, str) and "=" in entry:
            key, _, value = entry.partition("=")
            assert not fields.check_value(key, value, fields.find(Config, key), "", Config), name
        if fields.find(Config, name) is not None:
            assert not isinstance(entry, str | NoEffect | Always), name


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_every_entry_without_a_counterpart_says_why(framework: str) -> None:
    for name, entry in table_of(framework).keys.items():
        if not our_keys(entry):
            assert isinstance(entry, Always | NoEffect | Missing)
            assert len(entry.why.split()) >= 2, name


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("max_completion_length=8", "TRL's max_completion_length is generation.max_new_tokens here"),
        ("grpo.beta=0.1", "TRL's beta is loss_fn.reference_policy_kl_penalty here"),
        (
            "actor_rollout_ref.rollout.n=4",
            "verl's actor_rollout_ref.rollout.n is grpo.num_generations_per_prompt here",
        ),
        (
            "policy.dtensor_cfg.enabled=true",
            "NeMo-RL's policy.dtensor_cfg.enabled is policy.backend=fsdp here",
        ),
        ("logger.wandb_enabled=true", "NeMo-RL's logger.wandb_enabled is logger.wandb.mode here"),
        ("critic.optim.lr=1e-5", "verl's critic.optim.lr is value.optimizer.lr here"),
        ("algorithm.lam=0.9", "verl's algorithm.lam is value.gae_lambda here"),
        ("cliprange_value=0.2", "TRL's cliprange_value is value.clip_range here"),
        ("critic_pretrain=here", "OpenRLHF's critic_pretrain is value.model_name here"),
        ("n_samples_per_prompt=4", "OpenRLHF's n_samples_per_prompt is grpo.num_generations_per_prompt here"),
        (
            "grpo.async_grpo.enabled=true",
            "NeMo-RL's grpo.async_grpo.enabled is grpo.max_staleness here",
        ),
        ("global_profiler.tool=nsys", "verl's global_profiler has no effect here: logger.profile"),
        ("use_vllm=true", "TRL's use_vllm is always so here: vLLM generates"),
        ("grpo.lerning_rate=1", "did you mean policy.optimizer.lr, which is TRL's learning_rate?"),
    ],
)
def test_a_name_of_another_framework_is_told_in_the_words_of_this_one(argument: str, expected: str) -> None:
    assert f"is not a key of the configuration; {expected}" in message(argument)


def test_a_typing_error_in_a_key_of_its_group_wins_over_other_frameworks() -> None:
    assert "did you mean grpo.max_num_steps?" in message("grpo.max_steps=4")


def test_each_key_of_another_frameworks_file_is_told_by_itself(tmp_path: Path) -> None:
    path = tmp_path / "theirs.yaml"
    path.write_text(
        f"defaults: {DEMO}\n"
        "actor_rollout_ref: {rollout: {n: 4, temperature: 0.7}, model: {path: here}}\n"
        "algorithm: {adv_estimator: grpo}\n"
    )
    told = message(path=path)
    assert "5 problems" not in told and "4 problems" in told
    for expected in (
        "verl's actor_rollout_ref.rollout.n is grpo.num_generations_per_prompt here",
        "verl's actor_rollout_ref.rollout.temperature is generation.temperature here",
        "verl's actor_rollout_ref.model.path is policy.model_name here",
        "verl's algorithm.adv_estimator is grpo.adv_estimator.name here",
    ):
        assert expected in told


def test_epochs_are_not_said_to_be_steps() -> None:
    assert str(known_name("trainer.total_epochs")) == (
        "verl's trainer.total_epochs is grpo.max_num_epochs here "
        "(a step runs on into the next epoch, where verl drops the last prompts)"
    )
