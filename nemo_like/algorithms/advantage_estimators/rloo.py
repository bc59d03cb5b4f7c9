"""RLOO is REINFORCE with the mean reward of the group's other samples as baseline (arXiv 2402.14740).

A = R - mean(R of the group's other samples)
"""

from __future__ import annotations

from nemo_like.algorithms.advantages import group_relative_advantages
from nemo_like.algorithms.estimator_kind import EstimatorKind
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


KIND = EstimatorKind(
    about="RLOO: against the mean of the others of its group (arXiv 2402.14740)",
    function="nemo_like.algorithms.advantage_estimators.rloo:rloo",
    reference="nemo_like.tripwires.reference_advantages:leave_one_out",
    is_of_groups=True,
)
