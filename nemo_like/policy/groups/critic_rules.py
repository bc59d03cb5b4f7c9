"""Rules on the keys and the model of a critic."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nemo_like.config.problems import ConfigError, Problem
from nemo_like.models.model_info import VALUE_HEAD, model_of, stored_shapes
from nemo_like.policy.groups.policy_reader_rules import reader_model_problems, reader_problems
from nemo_like.policy.options import PolicyConfig, ValueConfig


def critic_group_problems(value: ValueConfig, policy: PolicyConfig, num_steps: int) -> Iterator[Problem]:
    """Yield every problem of a critic's keys, in a run of ``num_steps`` steps."""
    if value.freeze_vision_tower and not policy.freeze_vision_tower:
        yield Problem(
            key="value.freeze_vision_tower=true",
            rule="freezes nothing: a critic's model reads no images",
            remedy="set it to false",
        )
    yield from reader_problems("value", "critic", value, policy)
    if value.gae_lambda_policy is not None and value.gae_length_adaptive_alpha is not None:
        yield Problem(
            key=f"value.gae_lambda_policy={value.gae_lambda_policy:g}",
            rule=f"has no effect with value.gae_length_adaptive_alpha={value.gae_length_adaptive_alpha:g}, "
            "which gives each sample its own lambda",
            remedy="set one of them to null",
        )
    if value.warmup_steps >= num_steps:
        yield Problem(
            key=f"value.warmup_steps={value.warmup_steps}",
            rule=f"must be below grpo.max_num_steps={num_steps}, or the policy never trains",
            remedy=f"try {num_steps // 10}",
        )


def critic_model_problems(value: ValueConfig, policy: PolicyConfig) -> Iterator[Problem]:
    """Yield every problem of the critic's checkpoint beside the policy's; both must exist and be readable."""
    yield from reader_model_problems("value", "critic", value, policy)
    try:
        own = model_of(value)
    except ConfigError:  # another rule reports it
        return
    head = stored_shapes(Path(value.model_name)).get(VALUE_HEAD)
    if head is not None and head != [1, own.hidden_size]:
        yield Problem(
            key=f"value.model_name={value.model_name}",
            rule=f"has a tensor {VALUE_HEAD} of shape {head}, but a critic's head has one output, "
            f"[1, {own.hidden_size}]",
            remedy="use a reward model with one label, or a language model",
        )
