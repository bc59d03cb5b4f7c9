"""Causal attention with a mask, for what a kernel without one cannot do: windows, sinks, and queries after
keys that have none."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def attend_masked(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None,
    window: int | None,
    sinks: Tensor | None,
    num_earlier: Tensor | None = None,
) -> Tensor:
    """Have each query attend to its key and to those before it, to ``window`` keys or to all of them.

    query: [n, heads, T, d]; key: [n, groups, keys, d]; value: [n, groups, keys, e]; sinks: [heads].
    ``num_earlier``, [n] or [1] int64, says how many keys are before that of the first query; None says that
    the last query has the last key. Returns [n, heads, T, e]. The mask has T x keys elements, or n times as
    many where ``num_earlier`` has n.
    """
    device = query.device
    if num_earlier is None:
        num_earlier = torch.full((1,), key.shape[2] - query.shape[2], device=device)
    own = num_earlier[:, None, None, None] + torch.arange(query.shape[2], device=device)[:, None]
    behind = own - torch.arange(key.shape[2], device=device)  # by how many tokens a key is before a query's
    mask = behind >= 0 if window is None else (behind >= 0) & (behind < window)
    if sinks is not None:
        return _attend_to_sinks_too(query, key, value, sinks, mask, scale)
    return functional.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True)


def _attend_to_sinks_too(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, mask: Tensor, scale: float | None
) -> Tensor:
    """Compute attention with a further key for each head, whose product with every query is the head's sink,
    and which has no value.

    The further key is 0 but for a place after the head's own, where queries have the sink; kernels want
    places in eights.
    """
    size, value_size = query.shape[-1], value.shape[-1]
    scale = size**-0.5 if scale is None else scale
    logits = (sinks / scale).to(query.dtype)[:, None, None].expand(*query.shape[:-1], 1)
    query = functional.pad(torch.cat([query, logits], dim=-1), (0, 7))
    further = functional.one_hot(torch.tensor(size, device=key.device), size + 8).to(key.dtype)
    key = torch.cat([further.expand(*key.shape[:2], 1, -1), functional.pad(key, (0, 8))], dim=2)
    value = functional.pad(value, (0, 8, 1, 0))
    context = functional.scaled_dot_product_attention(
        query, key, value, functional.pad(mask, (1, 0), value=True), scale=scale, enable_gqa=True
    )
    return context[..., :value_size]
