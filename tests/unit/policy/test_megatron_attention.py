"""Megatron-core's packed samples in one attention kernel, which here is a loop on the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn.attention import varlen

from nemo_like.policy.backends.varlen import attend_varlen
from nemo_like.policy.batch.context_parts import context_positions
from nemo_like.policy.megatron import modules
from nemo_like.policy.megatron.modules import PackedSequences, TorchCoreAttention
from tests.unit.policy.largest_tensor import largest
from tests.unit.policy.varlen_by_hand import loops_over_sequences

LENGTHS = (12, 24, 12)  # of packed samples; two pieces for each of one, two or three ranks
HEADS, GROUPS, HEAD_SIZE = 4, 2, 8


def inputs(value_size: int = HEAD_SIZE) -> list[Tensor]:
    """Query, key and value of all samples, [T, heads, d]."""
    torch.manual_seed(5)
    shapes = ((HEADS, HEAD_SIZE), (GROUPS, HEAD_SIZE), (GROUPS, value_size))
    return [torch.randn(sum(LENGTHS), *shape, requires_grad=True) for shape in shapes]


def packed() -> PackedSequences:
    cu = torch.tensor((0, *LENGTHS)).cumsum(0).to(torch.int32)
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=cu,
        cu_seqlens_kv=cu,
        max_seqlen_q=max(LENGTHS),
        max_seqlen_kv=max(LENGTHS),
        lengths=LENGTHS,
    )


def tokens_of(rank: int, num_ranks: int) -> Tensor:
    """The places of a rank's tokens among those of all samples."""
    starts = (sum(LENGTHS[:number]) for number in range(len(LENGTHS)))
    return torch.cat(
        [
            start + context_positions(length, rank, num_ranks)
            for start, length in zip(starts, LENGTHS, strict=True)
        ]
    )


def attention(
    monkeypatch: pytest.MonkeyPatch, rank: int, num_ranks: int, window: int | None = None
) -> TorchCoreAttention:
    """The layer of one context-parallel rank, to which every rank's keys and values have come."""
    group = SimpleNamespace(size=lambda: num_ranks, rank=lambda: rank)
    monkeypatch.setattr(parallel_state, "get_context_parallel_group", lambda: group)
    config = TransformerConfig(
        num_layers=1,
        hidden_size=HEADS * HEAD_SIZE,
        num_attention_heads=HEADS,
        window_size=None if window is None else (window - 1, 0),
    )
    layer = TorchCoreAttention(config, 1, None, "self", softmax_scale=0.3)
    monkeypatch.setattr(layer, "_of_all_ranks", lambda of_all_ranks: of_all_ranks)
    return layer


@pytest.mark.parametrize(
    ("num_ranks", "window", "value_size"),
    [(1, None, HEAD_SIZE), (2, None, HEAD_SIZE), (3, None, HEAD_SIZE), (1, 5, HEAD_SIZE), (2, None, 6)],
)
def test_one_kernel_gives_what_a_loop_over_samples_gives(
    num_ranks: int, window: int | None, value_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Values and gradients, of every context-parallel rank."""
    monkeypatch.setattr(varlen, "varlen_attn", loops_over_sequences)
    ranks = [tokens_of(rank, num_ranks) for rank in range(num_ranks)]
    results = []
    for has_kernel in (True, False):
        monkeypatch.setattr(modules, "has_varlen_kernel", lambda query, has=has_kernel: has)
        query, key, value = inputs(value_size)
        keys, values = (each[torch.cat(ranks)] for each in (key, value))
        contexts = [
            attention(monkeypatch, rank, num_ranks, window)(
                query[mine], keys, values, packed_seq_params=packed()
            )
            for rank, mine in enumerate(ranks)
        ]
        (torch.cat(contexts) * torch.arange(value_size)).sum().backward()
        results.append([torch.cat(contexts), query.grad, key.grad, value.grad])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_a_query_attends_to_the_latest_keys_of_its_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """With equal keys it takes their values' mean: of tokens 0 to 3 the mean of the last two."""
    query, value = torch.zeros(4, 1, HEADS, HEAD_SIZE), torch.zeros(4, 1, GROUPS, HEAD_SIZE)
    value[:] = torch.tensor([0.0, 2.0, 4.0, 8.0])[:, None, None, None]
    context = attention(monkeypatch, 0, 1, window=2)(query, torch.zeros_like(value), value)
    assert context[:, 0, 0].tolist() == [0, 1, 3, 6]


def test_an_older_torch_gets_keys_for_every_head(monkeypatch: pytest.MonkeyPatch) -> None:
    def older(*tensors: Any, scale: float | None, window_size: tuple[int, int]) -> Tensor:
        return loops_over_sequences(*tensors, scale=scale, window_size=window_size)

    outputs = []
    for function in (older, loops_over_sequences):
        monkeypatch.setattr(varlen, "varlen_attn", function)
        outputs.append(attend_varlen(*inputs(), packed().sequences(0, 1)[0], None))
    assert outputs[0].equal(outputs[1])


def test_the_sequences_are_computed_once_for_all_layers() -> None:
    row = packed()
    assert row.sequences(1, 2) is row.sequences(1, 2)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_no_tensor_grows_with_the_square_of_a_sample(num_ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = attention(monkeypatch, 0, num_ranks)
    sizes = []
    for length in (1024, 2048):
        query = torch.randn(length // num_ranks, 1, HEADS, HEAD_SIZE, requires_grad=True)
        keys, values = (torch.randn(length, 1, GROUPS, HEAD_SIZE, requires_grad=True) for _ in range(2))
        sizes.append(largest(query, keys, values, layer))
    # Queries of the whole sample; a mask would have as many elements as there are pairs of a query and a key.
    assert sizes == [1024 * HEADS * HEAD_SIZE, 2048 * HEADS * HEAD_SIZE]
