"""REINFORCE++: the return of each token, whitened over the batch (arXiv 2501.03262).

A_t = (R - beta K_t - mean) / std      K_t: the KL to go of token t; mean and std over all response tokens
"""

from __future__ import annotations

from nemo_like.algorithms.advantage_estimators.whitening import whitened_over_tokens
from nemo_like.algorithms.estimators import AdvantageEstimator, AdvantageInputs, Advantages
from nemo_like.config.schema import GRPOConfig


def build(cfg: GRPOConfig) -> AdvantageEstimator:
    """Return the estimator, which has no settings."""
    return reinforce_plus_plus


def reinforce_plus_plus(inputs: AdvantageInputs) -> Advantages:
    """The return itself, whitened over all response tokens of the batch (arXiv 2501.03262).

    A token's return is the reward, less beta times its KL to go where there is one.
    """
    return whitened_over_tokens(inputs.rewards, inputs)
