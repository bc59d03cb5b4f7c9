"""Generalised advantage estimation over the tokens that the policy generated (arXiv 1506.02438).

    delta_i = r_i + gamma V_{i+1} - V_i
    A_i     = delta_i + gamma lambda A_{i+1}
    R_i     = A_i + V_i                            the target of token i's value in training

i counts the n response tokens of a sample alone, or of one token run of an agent's session: prompts and
tokens of environments between turns are skipped, as if the next response token followed at once. V_i is the
value of all tokens before response token i. V_{n+1} is 0, or, for a sample that was cut off at a limit, the
value of all its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenEstimates:
    """GAE's result for each token of a batch: packed [sum of lengths] float32, 0 where the mask is 0."""

    advantages: Tensor
    returns: Tensor


def length_adaptive_lambda(num_tokens: Tensor, alpha: float) -> Tensor:
    """Compute VAPO's lambda of each sample, 1 - 1 / (alpha x its response tokens), at least 0, [N] float64
    (arXiv 2504.05118).

    The sum of the weights lambda^k then is alpha times the length: long samples hear of their reward too.
    """
    return (1 - 1 / (alpha * num_tokens.double().clamp(min=1))).clamp(min=0)


def generalised_advantages(
    values: Tensor,
    rewards: Tensor,
    mask: Tensor,
    lengths: Tensor,
    end_values: Tensor,
    *,
    gamma: float,
    gae_lambda: float | Tensor,
) -> TokenEstimates:
    """Compute advantages and returns of all tokens of N sequences (samples, or token runs), in float64.

    ``values`` and ``rewards`` are packed [sum of lengths], sequences one after the other; entries where
    ``mask`` is 0 are ignored. ``lengths`` [N] int64 are the sequences' lengths, ``end_values`` [N] the values
    after their last tokens. ``gae_lambda`` is one for all sequences, or [N]. All are on one device. A
    sequence with a value that is not finite gets nan, and no other sequence does.
    """
    positions = mask.nonzero().squeeze(1)
    owner = torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths)[positions]
    counts = torch.bincount(owner, minlength=len(lengths))
    number = torch.arange(len(positions), device=positions.device) - (counts.cumsum(0) - counts)[owner]
    longest = int(counts.max()) if len(counts) else 0

    def rows(packed: Tensor) -> Tensor:
        """Return the response tokens of each sample as a row, [N, longest]."""
        return packed.new_zeros(len(lengths), longest, dtype=torch.float64).index_put_(
            (owner, number), packed[positions].double()
        )

    own, gained = rows(values), rows(rewards)
    advantages = torch.zeros_like(own)
    following = torch.zeros_like(end_values, dtype=torch.float64)  # A_{i+1}
    next_value = end_values.double()
    for token in reversed(range(longest)):
        is_token = token < counts
        delta = gained[:, token] + gamma * next_value - own[:, token]
        following = torch.where(is_token, delta + gamma * gae_lambda * following, following)
        next_value = torch.where(is_token, own[:, token], next_value)
        advantages[:, token] = following
    of_tokens = advantages[owner, number]

    def packed(chosen: Tensor) -> Tensor:
        return torch.zeros_like(values, dtype=torch.float32).index_copy_(0, positions, chosen.float())

    return TokenEstimates(packed(of_tokens), packed(of_tokens + own[owner, number]))
