"""Mends how vLLM's CPU build samples where it drafts.

vLLM gives every token of a draft its request's temperature, top-p and top-k by a kernel. On CPUs the kernel
writes its result into a copy, which vLLM drops, and uses uninitialised memory as temperatures. Tokens then
come from another distribution than the policy's, with log-probs that may be NaN, and nothing says so. GPUs
have another kernel.

Private part: ``rejection_sampler.expand_batch_to_tokens`` of vllm 0.32.0, which is replaced. vLLM has no
setting for it. This module can go with a vLLM whose kernel for CPUs returns its result.
"""

from __future__ import annotations

import torch
from torch import Tensor
from vllm.v1.sample import rejection_sampler


class DraftSamplingExtension:
    """A method that vLLM mixes into every worker."""

    def mend_draft_sampling(self) -> None:
        """Let this worker sample drafted tokens with the settings of their requests, on a CPU too."""
        rejection_sampler.expand_batch_to_tokens = expand_batch_to_tokens


def expand_batch_to_tokens(
    x: Tensor, cu_num_tokens: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0
) -> Tensor:
    """Return for each of ``num_tokens`` tokens its request's value of ``x``, as vLLM's function of this name.

    x: [requests]; cu_num_tokens: [requests], the cumulative sum of the requests' token counts. A value of
    ``replace_from`` becomes ``replace_to``.
    """
    counts = torch.diff(cu_num_tokens.long(), prepend=cu_num_tokens.new_zeros(1, dtype=torch.int64))
    return x.masked_fill(x == replace_from, replace_to).repeat_interleave(counts, output_size=num_tokens)
