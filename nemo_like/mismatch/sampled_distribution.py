"""The distribution from which sampling settings draw, computed from logits a second time."""

from __future__ import annotations

import torch
from torch import Tensor

from nemo_like.generation.sampling import SamplingSettings


def log_distribution(logits: Tensor, sampling: SamplingSettings) -> Tensor:
    """Return log-probs [T, V] float32 of tokens as they are drawn: by temperature, then the most likely
    ``top_k``, then the smallest set with ``top_p`` of the probability, then those with at least ``min_p``
    times the probability of the most likely. Other tokens get minus infinity."""
    logprobs = (logits.float() / (sampling.temperature or 1.0)).log_softmax(-1)
    if sampling.top_k:
        least = logprobs.topk(min(sampling.top_k, logprobs.shape[-1])).values[:, -1:]
        logprobs = logprobs.masked_fill(logprobs < least, -torch.inf).log_softmax(-1)
    if sampling.top_p < 1:
        ordered, order = logprobs.sort(descending=True)
        before = ordered.exp().cumsum(-1) - ordered.exp()
        dropped = torch.zeros_like(before, dtype=torch.bool).scatter(1, order, before >= sampling.top_p)
        logprobs = logprobs.masked_fill(dropped, -torch.inf).log_softmax(-1)
    if sampling.min_p:
        least = logprobs.amax(-1, keepdim=True) + torch.tensor(sampling.min_p).log()
        logprobs = logprobs.masked_fill(logprobs < least, -torch.inf).log_softmax(-1)
    return logprobs
