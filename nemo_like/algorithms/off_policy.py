"""What a loss does about tokens that another policy sampled: weights of the KL, and samples left out.

Tensors are packed, as in ``losses``; log-probs are [M] float32, nats. Results carry no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_like.algorithms.importance_sampling import sample_means
from nemo_like.algorithms.logprobs import limited


@torch.no_grad()
def kl_weights(logprobs: Tensor, generation_logprobs: Tensor) -> Tensor:
    """Compute pi / pi_engine of each token, [M], by which its KL is weighed.

    An estimate of the KL is a mean over tokens that the policy sampled. Where another policy sampled them,
    these weights make its mean that of the policy again (NeMo-RL, "On-policy KL approximation"). The
    log-ratio is limited to +-20.
    """
    return limited(logprobs - generation_logprobs).exp()


@torch.no_grad()
def on_policy_gate(
    logprobs: Tensor,
    generation_logprobs: Tensor,
    advantages: Tensor,
    sample_index: Tensor,
    response_lengths: Tensor,
    threshold: float,
) -> Tensor:
    """Return 0 for tokens with A < 0 of samples that have become too unlikely, and 1 for all others, [M].

    A sample has become too unlikely where the mean of log pi_engine - log pi over its tokens is above
    ``threshold``, in nats (DeepSeek-V3.2, arXiv 2512.02556, "off-policy sequence masking").
    """
    log_ratio = limited(generation_logprobs - logprobs)
    is_far = sample_means(log_ratio, sample_index, response_lengths) > threshold
    return 1.0 - (is_far & (advantages < 0)).to(logprobs.dtype)
