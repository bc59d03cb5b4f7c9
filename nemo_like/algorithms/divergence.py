"""Measures per token how far trainer and generation engine disagree on the same tokens' log-probs.

The engine sampled the tokens, so a mean over them estimates an expectation under the engine's distribution q.
An expectation under the trainer's distribution p needs the importance weight r = p / q. With d = log r, the
three divergences are estimated by f(r), with f convex and f(1) = f'(1) = 0: each value is at least 0, and
E_q f(r) is the divergence itself, without bias, since E_q r = 1.

    KL(q || p)          f(r) = r - 1 - d                 J. Schulman, "Approximating KL divergence": k3
    KL(p || q)          f(r) = r d - (r - 1)             k3 of the reverse KL, by importance weights
    Jensen-Shannon      f(r) = (r d - (1 + r) log((1 + r) / 2)) / 2
                             = (KL(p || m) + KL(q || m)) / 2, with the mixture m = (p + q) / 2
"""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_like.algorithms.logprobs import limited

# The names of the measures; metrics report each one's mean over response tokens, in this order.
DIVERGENCES = (
    "token_mult_prob_error",
    "gen_kl_error",
    "policy_kl_error",
    "js_divergence_error",
    "sampling_importance_ratio",
    "approx_entropy",
)


def divergences(trainer: Tensor, generation: Tensor) -> dict[str, Tensor]:
    """Compute every measure in ``DIVERGENCES``, by name, for M tokens that the engine sampled.

    Both arguments are log-probs, [M] float32, nats; results are [M] float64, since near d = 0 the divergences
    are about d^2, which float32 loses beside 1. Every log-ratio is limited to +-20.

    token_mult_prob_error: exp|generation - trainer|. gen_kl_error estimates KL(generation ||
    trainer), policy_kl_error KL(trainer || generation), js_divergence_error the Jensen-Shannon divergence.
    sampling_importance_ratio: p_trainer / p_generation. approx_entropy: the trainer's entropy, estimated from
    the samples.
    """
    trainer, generation = trainer.double(), generation.double()
    difference = limited(trainer - generation)
    ratio, gained = difference.exp(), torch.expm1(difference)
    log_mixture = torch.log1p(gained / 2)  # log((1 + r) / 2)
    return {
        "token_mult_prob_error": difference.abs().exp(),
        "gen_kl_error": gained - difference,
        "policy_kl_error": ratio * difference - gained,
        "js_divergence_error": (ratio * difference - (1 + ratio) * log_mixture) / 2,
        "sampling_importance_ratio": ratio,
        "approx_entropy": -ratio * trainer,
    }
