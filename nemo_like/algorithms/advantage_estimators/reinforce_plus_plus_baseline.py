"""REINFORCE++ with the group's mean as baseline (arXiv 2501.03262).

A_t = (R - mean(R of the group) - beta K_t - mean) / std      mean and std over all response tokens
"""

from __future__ import annotations

from nemo_like.algorithms.advantages import group_relative_advantages
from nemo_like.algorithms.estimator_kind import EstimatorKind
from nemo_like.algorithms.estimators import AdvantageInputs, Advantages, whitened_over_tokens
from nemo_like.algorithms.options import GRPOConfig


def reinforce_plus_plus_baseline(inputs: AdvantageInputs, cfg: GRPOConfig) -> Advantages:
    """Subtract the group's mean reward from each token's return, and whiten the result over all response
    tokens of the batch."""
    centred = group_relative_advantages(
        inputs.rewards,
        inputs.group_ids,
        normalize_rewards=False,
        use_leave_one_out_baseline=False,
        sample_mask=inputs.sample_mask,
    )
    return whitened_over_tokens(centred, inputs)


KIND = EstimatorKind(
    about="REINFORCE++ with the mean of the group as baseline (arXiv 2501.03262)",
    function="nemo_like.algorithms.advantage_estimators.reinforce_plus_plus_baseline:reinforce_plus_plus_baseline",
    reference="nemo_like.tripwires.reference_advantages:whitened_in_groups",
    whitens_tokens=True,
)
