"""Arguments that ``GRPO`` lacks are answered with what they are here."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from nemo_like import GRPO
from nemo_like.config import fields
from nemo_like.config.other_frameworks import Missing, NoEffect, our_keys, table_of
from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config

ARGUMENTS = [*inspect.signature(GRPO).parameters]


def answer(**arguments: Any) -> str:
    with pytest.raises(ConfigError) as raised:
        GRPO("models/tiny", **arguments)
    return str(raised.value)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"reward_funcs": [len]}, "reward_funcs is called reward here"),
        ({"train_dataset": []}, "train_dataset is called train here"),
        ({"eval_dataset": []}, "eval_dataset is called validation here"),
        ({"callbacks": []}, "callbacks is called on_step here"),
        ({"model_name_or_path": "a/b"}, "model_name_or_path is called model here"),
        ({"max_steps": 3}, "max_steps is called num_steps here (optimizer updates: / updates of a step; "),
        ({"args": object()}, "TRL's args is missing here: its fields are arguments, such as num_steps, or"),
        (
            {"processing_class": None},
            "has no effect here: the tokenizer is that of the model's directory; le",
        ),
        ({"peft_config": object()}, "peft_config is policy.lora here (enabled, rank, alpha, dropout and "),
        (
            {"learning_rate": 1e-5},
            "learning_rate is policy.optimizer.lr here; give overrides={'policy.optimizer.lr': 1e-05}",
        ),
        (
            {"epsilon": 0.2},
            "epsilon is loss_fn.ratio_clip_min and loss_fn.ratio_clip_max here; give "
            "overrides={'loss_fn.ratio_clip_min': 0.2, 'loss_fn.ratio_clip_max': 0.2}",
        ),
        ({"num_generations": 8}, "give overrides={'grpo.num_generations_per_prompt': 8}"),
        ({"max_completion_length": 256}, "give overrides={'generation.max_new_tokens': 256}"),
        ({"beta": 0.0}, "give overrides={'loss_fn.reference_policy_kl_penalty': 0.0}"),
        ({"per_device_train_batch_size": 4}, "give overrides={'policy.train_micro_batch_size': ...}"),
        (
            {"bf16": True},
            "is policy.precision=bfloat16 here; give overrides={'policy.precision': 'bfloat16'}",
        ),
        ({"use_vllm": True}, "TRL's use_vllm is always so here: vLLM generates; leave it out"),
        ({"n_samples_per_prompt": 4}, "give overrides={'grpo.num_generations_per_prompt': 4}"),  # OpenRLHF's
        ({"vaidation": []}, "vaidation is no argument; did you mean validation?"),
        ({"reward_func": len}, "reward_func is no argument; did you mean reward?"),
        ({"seed": 3}, "seed is grpo.seed here; give overrides={'grpo.seed': 3}"),
        ({"val_at_start": 1}, "is no argument; did you mean overrides={'grpo.val_at_start': 1}?"),
        ({"foo": 3}, "foo is no argument; there are model, reward, train, num_steps, "),
    ],
)
def test_an_argument_that_does_not_exist_is_answered(arguments: dict[str, Any], told: str) -> None:
    said = answer(**arguments)
    assert told in said
    assert said.startswith("1 problem ")


def test_all_such_arguments_are_answered_at_once_and_before_missing_ones() -> None:
    assert answer(reward_funcs=[len], train_dataset=[], max_steps=3).startswith("3 problems ")


def test_an_argument_that_is_missing_is_an_error_of_python() -> None:
    with pytest.raises(TypeError, match="missing 2 required keyword-only arguments: 'train' and 'num_steps'"):
        GRPO("models/tiny", reward=len)  # type: ignore[call-arg]


def test_every_argument_of_the_table_leads_to_an_argument_or_a_key_or_says_why() -> None:
    for name, entry in table_of("trl").arguments.items():
        assert name not in ARGUMENTS
        if isinstance(entry, str):
            assert entry in ARGUMENTS, name
        else:
            keys = our_keys(entry)
            assert keys or isinstance(entry, Missing | NoEffect), name
            assert all(fields.find(Config, end.key) is not None for end in keys), name
