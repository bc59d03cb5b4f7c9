"""Rules on the critic of grpo.adv_estimator.name=gae, the group value.

Most of its keys are those of every worker group, whose rules are in ``policy.group_rules`` and
``policy.backend_rules``.
"""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.algorithms.options import AdvantageEstimatorName
from nemo_like.config.problems import Problem
from nemo_like.configuration import Config
from nemo_like.policy.critic_rules import critic_group_problems

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
    yield from critic_group_problems(cfg.value, cfg.policy, cfg.grpo.max_num_steps)
