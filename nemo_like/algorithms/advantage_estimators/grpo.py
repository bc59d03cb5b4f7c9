"""GRPO judges a reward relative to its group (arXiv 2402.03300).

A = (R - mean) / (std + 1e-6)      mean and std of the group's rewards

With ``grpo.normalize_rewards=false``, A = R - mean. With ``grpo.use_leave_one_out_baseline``, mean and std
are taken over the group's other samples.
"""

from __future__ import annotations

from nemo_like.algorithms.advantages import group_relative_advantages
from nemo_like.algorithms.estimator_kind import EstimatorKind
from nemo_like.algorithms.estimators import AdvantageInputs
from nemo_like.algorithms.options import GRPOConfig


def grpo(inputs: AdvantageInputs, cfg: GRPOConfig) -> list[float]:
    """Compute GRPO's advantages with the configured baseline and normalisation."""
    return group_relative_advantages(
        inputs.rewards,
        inputs.group_ids,
        normalize_rewards=cfg.normalize_rewards,
        use_leave_one_out_baseline=cfg.use_leave_one_out_baseline,
        sample_mask=inputs.sample_mask,
    )


KIND = EstimatorKind(
    about="GRPO: relative to its group (arXiv 2402.03300)",
    function="nemo_like.algorithms.advantage_estimators.grpo:grpo",
    reference="nemo_like.tripwires.reference_advantages:relative",
    is_of_groups=True,
    chooses_baseline=True,
)
