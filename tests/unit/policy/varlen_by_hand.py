"""What stands for the kernel of variable-length attention, which runs on GPUs only."""

from __future__ import annotations

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
) -> Tensor:
    """What torch documents of varlen_attn: causal from each sequence's end."""
    before, after = window_size
    assert after == 0
    assert value.shape[-1] == key.shape[-1]
    outputs = []
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
    return torch.cat(outputs)
