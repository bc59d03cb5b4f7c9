"""Per-token figures that say how far trainer and generation engine disagree on the same tokens' log-probs."""

from __future__ import annotations

import math

from torch import Tensor, logaddexp

from nemo_like.algorithms.logprobs import limited

# Metrics report the mean of each over response tokens. Code that computes them keeps this order.
DIVERGENCES = (
    "token_mult_prob_error",
    "gen_kl_error",
    "policy_kl_error",
    "js_divergence_error",
    "sampling_importance_ratio",
    "approx_entropy",
)


def divergences(trainer: Tensor, generation: Tensor) -> dict[str, Tensor]:
    """Compute every figure of ``DIVERGENCES``, by name, for M tokens.

    Both arguments are log-probs, [M] float32, nats; so is each result. Every log-ratio is limited to +-20.

    token_mult_prob_error: exp|generation - trainer|. The KL figures are k3 estimates: gen_kl_error of
    KL(generation || trainer), policy_kl_error of KL(trainer || generation), and js_divergence_error is the
    mean of both sides' KL to the 50/50 mixture. sampling_importance_ratio: p_trainer / p_generation.
    approx_entropy: the trainer's entropy, estimated from the samples.
    """
    difference = limited(trainer - generation)
    ratio = difference.exp()
    mixture = logaddexp(trainer, generation) - math.log(2)
    return {
        "token_mult_prob_error": difference.abs().exp(),
        "gen_kl_error": _k3(difference),
        "policy_kl_error": _k3(-difference),
        "js_divergence_error": (_k3(trainer - mixture) + _k3(generation - mixture)) / 2,
        "sampling_importance_ratio": ratio,
        "approx_entropy": -ratio * trainer,
    }


def _k3(log_ratio: Tensor) -> Tensor:
    """Return exp(x) - 1 - x of the limited log-ratio x; it is >= 0, and 0 only at x = 0."""
    log_ratio = limited(log_ratio)
    return log_ratio.exp() - 1 - log_ratio
