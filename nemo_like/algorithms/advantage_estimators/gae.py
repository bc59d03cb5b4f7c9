"""GAE: each token has an advantage of its own, from a critic's values (arXiv 1506.02438).

The critic's workers compute the tokens' advantages (``algorithms.generalised_advantages``). This estimator
knows only their sums by sample, and returns the shift and scale that whiten them over the batch.

    A_t = (GAE_t - mean) / std      mean and std over all response tokens
"""

from __future__ import annotations

import math

from nemo_like.algorithms.estimator_kind import EstimatorKind
from nemo_like.algorithms.estimators import AdvantageInputs, Advantages, whitening_scale
from nemo_like.algorithms.options import GRPOConfig


def gae(inputs: AdvantageInputs, cfg: GRPOConfig) -> Advantages:
    """Return how the tokens' own advantages are shifted and scaled, so that over all response tokens of
    unmasked samples their mean is 0 and their biased variance 1. Masked samples get 0.

    Raises ValueError when there is no critic, and when the advantages of an unmasked sample are not finite.
    """
    if inputs.of_tokens is None:
        raise ValueError("needs the advantages of tokens, which a critic's workers compute (group value)")
    sums, squares = inputs.of_tokens.sums, inputs.of_tokens.square_sums
    valid = [i for i, kept in enumerate(inputs.sample_mask) if kept]
    for i in valid:
        if not math.isfinite(sums[i]):
            raise ValueError(
                f"the critic's advantages of sample {i} of group {inputs.group_ids[i]} are not finite: its "
                "values are not, or its reward"
            )
    num_tokens = math.fsum(inputs.num_response_tokens[i] for i in valid)
    if not num_tokens:
        return Advantages([0.0] * len(inputs.sample_mask), token_scale=0.0)
    mean = math.fsum(sums[i] for i in valid) / num_tokens
    scale = whitening_scale(math.fsum(squares[i] for i in valid) / num_tokens - mean**2)
    return Advantages([-mean * scale if kept else 0.0 for kept in inputs.sample_mask], token_scale=scale)


KIND = EstimatorKind(
    about="GAE: each token by a critic (arXiv 1506.02438)",
    function="nemo_like.algorithms.advantage_estimators.gae:gae",
    judges_in_groups=False,
    whitens_tokens=True,
    has_critic=True,
)
