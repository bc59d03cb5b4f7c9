"""Context parallelism: every rank holds some tokens of a row, and attends with some heads to all of them.

    [tokens of this rank, all heads] ── exchange ──▶ [all tokens, heads of this rank] ──▶ attention
                                     ◀── exchange ──

This is DeepSpeed-Ulysses (arXiv 2309.14509). Everything but attention works token by token, so each rank
computes it for its own tokens alone, and any attention for whole rows stays as it is.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_like.policy.batch.context_parts import context_positions
from nemo_like.policy.batch.policy_batch import ModelInputs


class ContextExchange:
    """Exchanges tokens for heads among the ranks of a context-parallel group, in one micro-batch."""

    def __init__(self, inputs: ModelInputs, group: dist.ProcessGroup) -> None:
        """Take the layout of the whole row from this rank's part of it."""
        self._group, self._size = group, group.size()
        num_tokens = self._size * inputs.input_ids.shape[1]
        lengths = (num_tokens,) if inputs.packing is None else inputs.packing.lengths
        in_parts = tokens_in_parts(lengths, self._size)
        self._in_parts = in_parts.to(inputs.input_ids.device)
        self._in_row = in_parts.argsort().to(inputs.input_ids.device)

    def to_heads(self, tensor: Tensor) -> Tensor:
        """Return all tokens of some heads, [n, H / ranks, T, d], for some tokens of all heads, [n, H, T /
        ranks, d].

        Key-value heads that are too few for the ranks are repeated before.
        """
        repeats = self._size // math.gcd(tensor.shape[1], self._size)
        if repeats > 1:
            tensor = tensor.repeat_interleave(repeats, dim=1)
        parts = tensor.unflatten(1, (self._size, -1)).movedim(1, 0)  # by rank that gets the heads
        received = _SwapParts.apply(parts.contiguous(), self._group)  # by rank that had the tokens
        return received.movedim(0, 2).flatten(2, 3).index_select(2, self._in_row)

    def to_tokens(self, tensor: Tensor) -> Tensor:
        """Return some tokens of all heads, [n, T / ranks, H, d], for all tokens of some heads, [n, T, H /
        ranks, d]."""
        parts = tensor.index_select(1, self._in_parts).unflatten(1, (self._size, -1)).movedim(1, 0)
        received = _SwapParts.apply(parts.contiguous(), self._group)
        return received.movedim(0, 2).flatten(2, 3)


def tokens_in_parts(lengths: Sequence[int], num_ranks: int) -> Tensor:
    """Return the positions in the row of the tokens of rank 0, of rank 1 and so on, [T] int64; ``lengths``
    are the samples' in the row."""
    starts = torch.tensor((0, *lengths[:-1])).cumsum(0).tolist()
    return torch.cat(
        [
            start + context_positions(length, rank, num_ranks)
            for rank in range(num_ranks)
            for start, length in zip(starts, lengths, strict=True)
        ]
    )


class _SwapParts(torch.autograd.Function):
    """Sends part i of a tensor [ranks, ...] to rank i, and returns the parts of all ranks, in their order."""

    @staticmethod
    def forward(ctx: Any, parts: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        received = torch.empty_like(parts)
        dist.all_to_all_single(received, parts, group=group)
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        received = torch.empty_like(grad, memory_format=torch.contiguous_format)
        dist.all_to_all_single(received, grad.contiguous(), group=ctx.group)
        return received, None
