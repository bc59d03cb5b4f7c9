"""Causal attention over sequences that lie end to end, in one kernel: PyTorch's variable-length
FlashAttention, which needs a GPU and half precision.

Private part: the backward pass of torch.nn.attention.varlen, which takes the sums that the forward pass
returns; autograd knows no gradient of these.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn import functional

_Forward = Callable[..., tuple[Tensor, Tensor]]
_Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]
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
    sinks: Tensor | None = None,
) -> Tensor:
    """Compute causal attention. query: [tokens, heads, d]; key: [tokens, groups, d]; value: [tokens, groups,
    e], with e at most d.

    With ``window`` a query attends to that many of its latest keys. Each of ``sinks``, [heads], is a logit
    that takes a share of its head's attention. Returns [tokens, heads, e].
    """
    from torch.nn.attention.varlen import AuxRequest, varlen_attn

    value_size = value.shape[-1]
    if missing := query.shape[-1] - value_size:  # the kernel takes values of the size of keys alone
        value = functional.pad(value, (0, missing))
    options: dict[str, bool] = {}
    if (num_shared := query.shape[1] // key.shape[1]) > 1:
        if "enable_gqa" in signature(varlen_attn).parameters:
            options = {"enable_gqa": True}
        else:  # torch 2.11 wants as many keys as queries
            key, value = (tensor.repeat_interleave(num_shared, dim=1) for tensor in (key, value))
    # Causal, with the last query at the last key.
    reach = (-1 if window is None else window - 1, 0)
    places = (where.cu_queries, where.cu_keys, where.max_queries, where.max_keys)
    if sinks is not None:
        forward = partial(
            varlen_attn, return_aux=AuxRequest(lse=True), scale=scale, window_size=reach, **options
        )
        unused = torch.zeros(2, dtype=torch.uint64, device=query.device)  # a generator's state
        backward = partial(torch.ops.torch_attn._varlen_attn_backward, scale=scale, window_size=list(reach))
        context = attend_with_sinks(
            *(query, key, value, sinks),
            lambda *tensors: forward(*tensors, *places),
            lambda *tensors: backward(*tensors, *places, reach == (-1, 0), unused),
        )
    else:
        context = varlen_attn(query, key, value, *places, scale=scale, window_size=reach, **options)
    return context[..., :value_size]


def attend_with_sinks(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, forward: _Forward, backward: _Backward
) -> Tensor:
    """Compute attention in which each of ``sinks``, [heads], is the logit of a further key without a value,
    by a kernel's two passes.

    ``forward`` returns, from query, key and value, the attention without sinks, and the logarithms of its
    sums of exponentials, [heads, tokens] float32. ``backward`` returns the gradients of query, key and value,
    from the output's gradient, these three, an output and the logarithms that go with it.
    """
    context: Tensor = _SinkAttention.apply(query, key, value, sinks, forward, backward)
    return context


class _SinkAttention(torch.autograd.Function):
    """Attention in which the sum of exponentials over the keys has that of a sink added.

    A probability is exp(product - log(sum)), with the sum that includes the sink. A kernel's backward pass
    computes probabilities anew from the sums, so that given these sums, and the output that goes with them,
    it returns the gradients of attention with sinks.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor,
        forward: _Forward,
        backward: _Backward,
    ) -> Tensor:
        alone, sums = forward(query, key, value)
        with_sinks = torch.logaddexp(sums, sinks[:, None].to(sums.dtype))
        context = (alone * (sums - with_sinks).exp().t()[..., None]).to(query.dtype)
        ctx.of_kernel = backward
        ctx.save_for_backward(query, key, value, sinks, context, with_sinks)
        return context

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Compute the gradients; a sink's is minus the sum over tokens of its share times grad . context."""
        query, key, value, sinks, context, sums = ctx.saved_tensors
        grads = ctx.of_kernel(grad.contiguous(), query, key, value, context, sums)
        shares = (sinks[:, None].to(sums.dtype) - sums).exp()
        of_sinks = -(shares * (grad.to(sums.dtype) * context).sum(-1).t()).sum(1)
        return (*grads, of_sinks.to(sinks.dtype), None, None)


def _cumulative(lengths: Tensor) -> Tensor:
    return functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
