"""Causal attention over sequences that lie end to end, in one kernel: PyTorch's variable-length
FlashAttention, which needs a GPU and half precision."""

from __future__ import annotations

from dataclasses import dataclass
from inspect import signature
from typing import Self

import torch
from torch import Tensor
from torch.nn import functional

_DTYPES = (torch.bfloat16, torch.float16)
_MAX_HEAD_SIZE = 256


def has_varlen_kernel(query: Tensor) -> bool:
    """Return whether ``attend_varlen`` can run on this device, dtype and head size."""
    head_size = query.shape[-1]
    return query.is_cuda and query.dtype in _DTYPES and head_size <= _MAX_HEAD_SIZE and head_size % 8 == 0


@dataclass(frozen=True, slots=True)
class Sequences:
    """Where k sequences of queries lie, and the keys to which each attends.

    The last query of a sequence attends to all its keys, the query before it to all but the last, and so on.
    The tensors are on the device of the queries.
    """

    cu_queries: Tensor  # [k + 1] int32
    cu_keys: Tensor  # [k + 1] int32
    max_queries: int
    max_keys: int

    @classmethod
    def of(cls, num_queries: Tensor, num_keys: Tensor) -> Self:
        """Lay sequences of ``num_queries`` and ``num_keys``, both [k] int64, end to end."""
        return cls(
            cu_queries=_cumulative(num_queries),
            cu_keys=_cumulative(num_keys),
            max_queries=int(num_queries.max()),
            max_keys=int(num_keys.max()),
        )


def attend_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    where: Sequences,
    scale: float | None,
    window: int | None = None,
) -> Tensor:
    """Compute causal attention. query: [tokens, heads, d]; key: [tokens, groups, d]; value: [tokens, groups,
    e], with e at most d.

    With ``window`` a query attends to that many of its latest keys. Returns [tokens, heads, e].
    """
    from torch.nn.attention.varlen import varlen_attn

    value_size = value.shape[-1]
    if missing := query.shape[-1] - value_size:  # the kernel takes values of the size of keys alone
        value = functional.pad(value, (0, missing))
    options: dict[str, bool] = {}
    if (num_shared := query.shape[1] // key.shape[1]) > 1:
        if "enable_gqa" in signature(varlen_attn).parameters:
            options = {"enable_gqa": True}
        else:  # torch 2.11 wants as many keys as queries
            key, value = (tensor.repeat_interleave(num_shared, dim=1) for tensor in (key, value))
    context: Tensor = varlen_attn(
        query,
        key,
        value,
        where.cu_queries,
        where.cu_keys,
        where.max_queries,
        where.max_keys,
        scale=scale,
        # Causal, with the last query at the last key.
        window_size=(-1 if window is None else window - 1, 0),
        **options,
    )
    return context[..., :value_size]


def _cumulative(lengths: Tensor) -> Tensor:
    return functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
