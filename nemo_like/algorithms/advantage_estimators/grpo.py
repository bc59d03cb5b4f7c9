"""GRPO: the reward relative to its group (arXiv 2402.03300).

A = (R - mean) / (std + 1e-6)      of the group; without ``grpo.normalize_rewards`` no division, and with
``grpo.use_leave_one_out_baseline`` the mean of the group's other samples
"""

from __future__ import annotations

from nemo_like.algorithms.advantages import group_relative_advantages
from nemo_like.algorithms.estimators import AdvantageEstimator
from nemo_like.config.schema import GRPOConfig


def build(cfg: GRPOConfig) -> AdvantageEstimator:
    """Return the estimator with the configured baseline and normalisation."""
    return lambda inputs: group_relative_advantages(
        inputs.rewards,
        inputs.group_ids,
        normalize_rewards=cfg.normalize_rewards,
        use_leave_one_out_baseline=cfg.use_leave_one_out_baseline,
        sample_mask=inputs.sample_mask,
    )
