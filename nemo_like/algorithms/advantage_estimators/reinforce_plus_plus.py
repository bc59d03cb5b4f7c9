"""REINFORCE++ whitens the return of each token over the batch (arXiv 2501.03262).

A_t = (R - beta K_t - mean) / std      K_t: the KL to go of token t; mean and std over all response tokens
"""

from __future__ import annotations

from nemo_like.algorithms.estimator_kind import EstimatorKind
from nemo_like.algorithms.estimators import AdvantageInputs, Advantages, whitened_over_tokens
from nemo_like.algorithms.options import GRPOConfig


def reinforce_plus_plus(inputs: AdvantageInputs, cfg: GRPOConfig) -> Advantages:
    """Whiten the return of each token over all response tokens of the batch (arXiv 2501.03262).

    A token's return is its sample's reward, minus beta times the token's KL to go with a KL in the reward.
    """
    return whitened_over_tokens(inputs.rewards, inputs)


KIND = EstimatorKind(
    about="REINFORCE++: returns whitened over tokens (arXiv 2501.03262)",
    function="nemo_like.algorithms.advantage_estimators.reinforce_plus_plus:reinforce_plus_plus",
    reference="nemo_like.tripwires.reference_advantages:whitened",
    judges_in_groups=False,
    whitens_tokens=True,
)
