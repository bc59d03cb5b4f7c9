"""Rules on the critic of grpo.adv_estimator.name=gae, the group value.

Most of its keys are those of every worker group, whose rules are in ``policy.group_rules`` and
``policy.backend_rules``.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nemo_like.algorithms.options import AdvantageEstimatorName
from nemo_like.config.problems import ConfigError, Problem
from nemo_like.configuration import Config
from nemo_like.models.model_info import VALUE_HEAD, model_of, stored_shapes
from nemo_like.policy.options import ValueConfig
from nemo_like.rules.beside_policy import beside_policy, model_beside_policy

_GAE = AdvantageEstimatorName.gae.name


def critic_problems(cfg: Config) -> Iterator[Problem]:
    """Yield every problem with whether there is a critic, and with keys that it does not go with."""
    has_gae = cfg.grpo.adv_estimator.name == _GAE
    if has_gae and cfg.value is None:
        yield Problem(
            key=f"grpo.adv_estimator.name={_GAE}",
            rule="needs a critic, whose values the advantages come from",
            remedy="add `- value: default` to the defaults, or value=default to the command line",
        )
    if cfg.value is None:
        return
    if not has_gae:
        yield Problem(
            key="value",
            rule="is a critic, whose values are not for "
            f"grpo.adv_estimator.name={cfg.grpo.adv_estimator.name}",
            remedy=f"set grpo.adv_estimator.name={_GAE}, or leave the group value out",
        )
    if cfg.grpo.skip_idle_samples:
        yield Problem(
            key="grpo.skip_idle_samples=true",
            rule=f"does not go with grpo.adv_estimator.name={_GAE}: every token has an advantage of its own",
            remedy="set it to false",
        )
    yield from _of_the_group(cfg, cfg.value)


def _of_the_group(cfg: Config, value: ValueConfig) -> Iterator[Problem]:
    if value.lora.enabled:
        yield Problem(
            key="value.lora.enabled=true",
            rule="is not supported: a critic's output layer is new, and would have no adapter",
            remedy="set it to false",
        )
    if value.freeze_vision_tower and not cfg.policy.freeze_vision_tower:
        yield Problem(
            key="value.freeze_vision_tower=true",
            rule="freezes nothing: a critic's model reads no images",
            remedy="set it to false",
        )
    yield from beside_policy("value", "critic", value, cfg.policy)
    if value.warmup_steps >= cfg.grpo.max_num_steps:
        yield Problem(
            key=f"value.warmup_steps={value.warmup_steps}",
            rule=f"must be below grpo.max_num_steps={cfg.grpo.max_num_steps}, or the policy never trains",
            remedy=f"try {cfg.grpo.max_num_steps // 10}",
        )


def critic_model_problems(cfg: Config, value: ValueConfig) -> Iterator[Problem]:
    """Yield every problem of the critic's checkpoint beside the policy's. Both are there and can be read."""
    yield from model_beside_policy("value", "critic", value, cfg.policy)
    try:
        own = model_of(value)
    except ConfigError:  # told elsewhere
        return
    head = stored_shapes(Path(value.model_name)).get(VALUE_HEAD)
    if head is not None and head != [1, own.hidden_size]:
        yield Problem(
            key=f"value.model_name={value.model_name}",
            rule=f"has a tensor {VALUE_HEAD} of shape {head}, but a critic's head has one output, "
            f"[1, {own.hidden_size}]",
            remedy="use a reward model with one label, or a language model",
        )
