"""Whitening: shifts and scales advantages to mean 0 and variance 1 over a batch's response tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

from nemo_like.algorithms.estimators import AdvantageInputs, Advantages

_MIN_VARIANCE = 1e-8


def whitening_scale(variance: float) -> float:
    """Return ``1 / sqrt(max(variance, 1e-8))``, the factor that gives values of this variance a variance of
    1, or less where they hardly differ."""
    return 1.0 / math.sqrt(max(variance, _MIN_VARIANCE))


def whitened_over_tokens(values: Sequence[float], inputs: AdvantageInputs) -> Advantages:
    """Compute ``(x - mean) / sqrt(max(variance, 1e-8))`` of every token's ``x = value - beta K_t``.

    ``values`` has one value per sample; mean and the biased variance are over all response tokens of unmasked
    samples. Masked samples get 0. All samples get 0 when there is no response token, or when, without a KL
    in the reward, all unmasked values are equal.

    Raises ValueError when an unmasked value is not finite.
    """
    valid = [i for i, kept in enumerate(inputs.sample_mask) if kept]
    for i in valid:
        if not math.isfinite(values[i]):
            raise ValueError(f"reward of sample {i} is {values[i]}; mask the sample (sample_mask 0) instead")
    tokens, kl = inputs.num_response_tokens, inputs.kl
    num_tokens = math.fsum(tokens[i] for i in valid)
    if not num_tokens or (kl is None and len({values[i] for i in valid}) == 1):
        return Advantages([0.0] * len(values))
    beta = kl.coefficient if kl else 0.0
    kl_sums, kl_squares = (kl.sums, kl.square_sums) if kl else ([0.0] * len(values),) * 2
    mean = math.fsum(tokens[i] * values[i] - beta * kl_sums[i] for i in valid) / num_tokens
    # For each sample: the sum over its tokens of (c - beta K_t)^2, with c = value - mean.
    squares = (
        tokens[i] * (values[i] - mean) ** 2
        - 2 * beta * (values[i] - mean) * kl_sums[i]
        + beta**2 * kl_squares[i]
        for i in valid
    )
    scale = whitening_scale(math.fsum(squares) / num_tokens)
    whitened = [0.0] * len(values)
    for i in valid:
        whitened[i] = (values[i] - mean) * scale
    return Advantages(whitened, beta * scale)
