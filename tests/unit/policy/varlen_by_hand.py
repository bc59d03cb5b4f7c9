"""What stands for the kernel of variable-length attention, which runs on GPUs only."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def loops_over_sequences(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_query: Tensor,
    cu_key: Tensor,
    max_query: int,
    max_key: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
    enable_gqa: bool = False,
    return_aux: Any = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """What torch documents of varlen_attn: causal from each sequence's end. With ``return_aux`` it returns
    the logarithms of the sums of exponentials too, [heads, tokens]."""
    before, after = window_size
    assert after == 0
    assert value.shape[-1] == key.shape[-1]
    outputs, sums = [], []
    for number in range(len(cu_query) - 1):
        queries = query[cu_query[number] : cu_query[number + 1]]
        keys, values = (each[cu_key[number] : cu_key[number + 1]] for each in (key, value))
        assert len(queries) <= max_query
        assert len(keys) <= max_key
        gap = len(keys) - len(queries)
        mask = torch.ones(len(queries), len(keys), dtype=torch.bool).tril(gap)
        mask = mask if before < 0 else mask.triu(gap - before)
        by_head = (each.transpose(0, 1) for each in (queries, keys, values))
        output = functional.scaled_dot_product_attention(*by_head, mask, scale=scale, enable_gqa=enable_gqa)
        outputs.append(output.transpose(0, 1))
        of_heads = keys.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        products = torch.einsum("qhd,khd->hqk", queries, of_heads) * (scale or key.shape[-1] ** -0.5)
        sums.append(products.masked_fill(~mask, -torch.inf).logsumexp(-1))
    context = torch.cat(outputs)
    return context if return_aux is None else (context, torch.cat(sums, dim=1))


def sinks_by_the_sums(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, forward: Any, backward: Any
) -> Tensor:
    """What ``attend_with_sinks`` returns, of a forward pass that autograd differentiates."""
    alone, sums = forward(query, key, value)
    shares = (sums - torch.logaddexp(sums, sinks[:, None])).exp()
    context: Tensor = alone * shares.t()[..., None]
    return context
