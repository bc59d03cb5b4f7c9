"""RLOO is REINFORCE with the mean reward of the group's other samples as baseline (arXiv 2402.14740).

A = R - mean(R of the group's other samples)
"""

from __future__ import annotations

from nemo_like.algorithms.advantages import group_relative_advantages
from nemo_like.algorithms.estimators import AdvantageInputs
from nemo_like.algorithms.options import GRPOConfig


def rloo(inputs: AdvantageInputs, cfg: GRPOConfig) -> list[float]:
    """Subtract the mean of the group's other rewards from each reward; 0 where there is no other one."""
    return group_relative_advantages(
        inputs.rewards,
        inputs.group_ids,
        normalize_rewards=False,
        use_leave_one_out_baseline=True,
        sample_mask=inputs.sample_mask,
    )
