"""Checks the critic, the group ``value``, and the estimator that needs a critic.

The rules of ``policy.groups`` and ``policy.backends`` check the keys that all worker groups have.
"""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.algorithms.estimator_kind import estimator_kind_of
from nemo_like.algorithms.options import ESTIMATOR_KINDS
from nemo_like.config.problems import Problem
from nemo_like.configuration import Config
from nemo_like.policy.groups.critic_rules import critic_group_problems


def critic_problems(cfg: Config) -> Iterator[Problem]:
    """Yield a problem when a critic is missing, superfluous, or combined with keys that exclude one."""
    name, has_critic = cfg.grpo.adv_estimator.name, estimator_kind_of(cfg.grpo).has_critic
    if has_critic and cfg.value is None:
        yield Problem(
            key=f"grpo.adv_estimator.name={name}",
            rule="needs a critic, whose values the advantages come from",
            remedy="add `- value: default` to the defaults, or value=default to the command line",
        )
    if cfg.value is None:
        return
    if not has_critic:
        with_critic = [one for one in ESTIMATOR_KINDS.names() if ESTIMATOR_KINDS.load(one).has_critic]
        yield Problem(
            key="value",
            rule=f"is a critic, whose values are not for grpo.adv_estimator.name={name}",
            remedy=f"set grpo.adv_estimator.name={' or '.join(with_critic)}, or leave the group value out",
        )
    if cfg.grpo.skip_idle_samples:
        yield Problem(
            key="grpo.skip_idle_samples=true",
            rule=f"does not go with grpo.adv_estimator.name={name}: every token has an advantage of its own",
            remedy="set it to false",
        )
    yield from critic_group_problems(cfg.value, cfg.policy, cfg.grpo.max_num_steps)
