"""Joins what the context-parallel ranks have scored."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from nemo_like.algorithms.critic import TokenValues
from nemo_like.algorithms.logprobs import TokenScores
from nemo_like.policy.batch.policy_batch import ModelInputs


def of_all_context_ranks(
    outputs: TokenScores | TokenValues, inputs: ModelInputs, group: dist.ProcessGroup
) -> TokenScores | TokenValues:
    """Return the outputs for all M scored tokens of a micro-batch; each context-parallel rank passes
    ``outputs`` of its own tokens."""
    assert inputs.context_index is not None
    # One tensor for one collective. Ids are exact in it: float32 has all whole numbers up to 2^24.
    rows = [one.unsqueeze(1).flatten(1).t().to(outputs.tensors[0].dtype) for one in outputs.tensors]
    everyone = _GatherScored.apply(torch.cat(rows), inputs.context_index, len(inputs.packed_index), group)
    parts = everyone.split([len(row) for row in rows])
    return outputs.of(
        [
            part[0] if own.ndim == 1 else part.t().to(own.dtype)
            for part, own in zip(parts, outputs.tensors, strict=True)
        ]
    )


class _GatherScored(torch.autograd.Function):
    """Puts every rank's values at their indexes in one tensor, the same on all ranks.

    Each rank then computes the whole loss, so the gradient of its own values is complete without a sum over
    ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, indexes: Tensor, num_tokens: int, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.save_for_backward(indexes)
        everyone = values.new_zeros(len(values), num_tokens).index_copy_(1, indexes, values)
        dist.all_reduce(everyone, group=group)
        return everyone

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (indexes,) = ctx.saved_tensors
        return grad[:, indexes], None, None, None
