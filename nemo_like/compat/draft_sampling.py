"""Mends how vLLM's CPU build samples where it drafts.

vLLM 0.32 gives every token of a draft its request's temperature, top-p and top-k by a kernel whose result it
drops on CPUs: the kernel writes into a copy of integers, and memory that nobody has written stands for the
temperatures. Tokens then come from another distribution than the policy's, with log-probs that may be no
numbers, and nothing says so. On GPUs the kernel is another one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.v1.sample import rejection_sampler


class DraftSamplingExtension:
    """A method that vLLM mixes into every worker."""

    def mend_draft_sampling(self) -> None:
        """From now on, sample drafted tokens with the settings of their requests on a CPU too."""
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Return the value of its request for each of ``num_tokens`` tokens, as vLLM's function of this name.

    x: [requests]; cu_num_tokens: [requests], the tokens of each request and of those before it. A value of
    ``replace_from`` becomes ``replace_to``.
    """
    counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1, dtype=torch.int64))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)
