"""Attention with sinks, in one kernel and by a further key, against the formula in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import varlen

from nemo_like.policy.backends.masked_attention import attend_masked
from nemo_like.policy.backends.varlen import Sequences, attend_varlen, attend_with_sinks

TOKENS, HEADS, GROUPS, SIZE, SCALE = 9, 4, 2, 6, 0.3


def inputs() -> list[Tensor]:
    """Query, key and value of one sample, [T, heads, d], and the sinks, [heads]."""
    torch.manual_seed(3)
    shapes = ((TOKENS, HEADS, SIZE), (TOKENS, GROUPS, SIZE), (TOKENS, GROUPS, SIZE), (HEADS,))
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def mask(window: int | None) -> Tensor:
    earlier = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    return earlier if window is None else earlier.triu(1 - window)


def products(query: Tensor, key: Tensor, seen: Tensor) -> Tensor:
    """[heads, T, T], and minus infinity where a query does not see a key."""
    keys = key.repeat_interleave(HEADS // GROUPS, dim=1)
    return (torch.einsum("ihd,jhd->hij", query, keys) * SCALE).masked_fill(~seen, -torch.inf)


def dense(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, seen: Tensor) -> Tensor:
    """A softmax over the keys and the sink, whose share is dropped."""
    logits = torch.cat([products(query, key, seen), sinks[:, None, None].expand(-1, TOKENS, 1)], dim=-1)
    shares = logits.softmax(-1)[..., :-1]
    return torch.einsum("hij,jhd->ihd", shares, value.repeat_interleave(HEADS // GROUPS, dim=1))


class DenseKernel:
    """Attention as FlashAttention computes it (arXiv 2205.14135): the backward pass makes the shares anew
    from the sums, and takes grad . context for the mean over keys."""

    def __init__(self, seen: Tensor) -> None:
        self._seen = seen

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        logits = products(query, key, self._seen)
        values = value.repeat_interleave(HEADS // GROUPS, dim=1)
        return torch.einsum("hij,jhd->ihd", logits.softmax(-1), values), logits.logsumexp(-1)

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, context: Tensor, sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = (each.repeat_interleave(HEADS // GROUPS, dim=1) for each in (key, value))
        shares = (products(query, key, self._seen) - sums[..., None]).exp()
        mean = (grad * context).sum(-1).t()[..., None]
        of_logits = shares * (torch.einsum("ihd,jhd->hij", grad, values) - mean) * SCALE
        of_key, of_value = (
            torch.einsum("hij,ihd->jhd", of_logits, query),
            torch.einsum("hij,ihd->jhd", shares, grad),
        )
        of_groups = (each.unflatten(1, (GROUPS, -1)).sum(2) for each in (of_key, of_value))
        return (torch.einsum("hij,jhd->ihd", of_logits, keys), *of_groups)


def in_one_kernel(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, window: int | None = None
) -> Tensor:
    kernel = DenseKernel(mask(window))
    return attend_with_sinks(query, key, value, sinks, kernel.forward, kernel.backward)


def by_a_further_key(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, window: int | None = None
) -> Tensor:
    by_head = (each.transpose(0, 1)[None] for each in (query, key, value))
    return attend_masked(*by_head, SCALE, window, sinks)[0].transpose(0, 1)


def by_the_formula(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, window: int | None = None
) -> Tensor:
    return dense(query, key, value, sinks, mask(window))


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("way", [in_one_kernel, by_a_further_key])
def test_values_and_all_gradients_are_those_of_the_formula(way: object, window: int | None) -> None:
    results = []
    for function in (way, by_the_formula):
        tensors = inputs()
        context = function(*tensors, window)
        (context * torch.arange(SIZE)).square().sum().backward()
        results.append([context, *(tensor.grad for tensor in tensors)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_the_kernels_passes_get_the_window_and_the_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel, where = DenseKernel(mask(3)), Sequences.of(torch.tensor([TOKENS]), torch.tensor([TOKENS]))
    places = (where.cu_queries, where.cu_keys, TOKENS, TOKENS)

    def forward(*given: Any, return_aux: Any, enable_gqa: bool, **options: Any) -> tuple[Tensor, Tensor]:
        assert given[3:] == places and return_aux.lse and enable_gqa
        assert options == {"scale": SCALE, "window_size": (2, 0)}
        return kernel.forward(*given[:3])

    def backward(*given: Any, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
        assert given[6:10] == places and given[10] is False
        assert options == {"scale": SCALE, "window_size": [2, 0]}
        return kernel.backward(*given[:6])

    monkeypatch.setattr(varlen, "varlen_attn", forward)
    monkeypatch.setattr(torch.ops.torch_attn, "_varlen_attn_backward", backward)
    query, key, value, sinks = inputs()
    found = attend_varlen(query, key, value, where, SCALE, 3, sinks)
    expected = dense(query, key, value, sinks, mask(3))
    for one, other in zip(
        *([each, *torch.autograd.grad(each.square().sum(), [query, sinks])] for each in (found, expected)),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_queries_may_be_the_last_of_a_sample() -> None:
    query, key, value, sinks = (tensor.detach() for tensor in inputs())
    last = by_a_further_key(query[-4:], key, value, sinks, 3)
    torch.testing.assert_close(last, by_the_formula(query, key, value, sinks, 3)[-4:])


def test_the_kernels_backward_pass_takes_the_output_and_the_sums() -> None:
    names = [one.name for one in torch.ops.torch_attn._varlen_attn_backward.default._schema.arguments]
    places = ["cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    tensors = ["grad_out", "query", "key", "value", "out", "lse"]
    assert names == [*tensors, *places, "is_causal", "rng_state", "scale", "window_size"]


@pytest.mark.parametrize("way", [in_one_kernel, by_a_further_key])
def test_a_sink_takes_its_share_of_what_a_query_attends_to(way: object) -> None:
    """The products are 0, so that after three keys a sink of log 3 takes a half, and the keys' values have
    the rest: of 1, 2 and 3 the mean, halved. The first token has a key and the sink: a quarter of 1."""
    query, key, value, sinks = (tensor.detach() * 0 for tensor in inputs())
    value[:3] += torch.tensor([1.0, 2.0, 3.0])[:, None, None]
    context = way(query, key, value, sinks + torch.tensor(3.0).log())
    assert context[[0, 2], 0, 0].tolist() == pytest.approx([0.25, 1.0])
