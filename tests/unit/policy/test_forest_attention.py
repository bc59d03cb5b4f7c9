"""Attention in a row that is a forest: what every token gets from its path alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention import varlen

from nemo_like.batch.forest import ROOT, Forest, TokenRun
from nemo_like.batch.micro_batches import round_up
from nemo_like.policy.backends import varlen as own_varlen
from nemo_like.policy.batch import forest_attention
from nemo_like.policy.batch.context_parts import ContextRank, context_positions
from nemo_like.policy.batch.forest_attention import PaddedAttention, VarlenAttention
from tests.unit.batch.forests import forests, path_of
from tests.unit.policy.largest_tensor import largest
from tests.unit.policy.varlen_by_hand import loops_over_sequences, sinks_by_the_sums

HEADS, GROUPS, HEAD_SIZE, VALUE_SIZE, SCALE = 4, 2, 8, 6, 0.3
NUM_UNUSED = 2
Kind = type[PaddedAttention] | type[VarlenAttention]


@pytest.fixture(autouse=True, scope="module")
def kernel_by_hand() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(varlen, "varlen_attn", loops_over_sequences)
        patch.setattr(own_varlen, "attend_with_sinks", sinks_by_the_sums)
        yield


def inputs(num_slots: int) -> list[Tensor]:
    """Query, key and value."""
    torch.manual_seed(3)
    shapes = ((HEADS, HEAD_SIZE), (GROUPS, HEAD_SIZE), (GROUPS, VALUE_SIZE))
    return [torch.randn(num_slots, *shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


def some_sinks() -> Tensor:
    return torch.tensor([-1.0, 0.0, 0.5, 2.0], dtype=torch.float64, requires_grad=True)


def with_a_mask(
    forest: Forest,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """The definition: softmax over a token's path, or over the latest tokens of it, and over a head's sink,
    whose share is dropped. [T, heads, v]"""
    parents, count = forest.parents(), forest.num_tokens
    allowed = torch.zeros(count, count, dtype=torch.bool)
    for token in range(count):
        allowed[token, path_of(token, parents)[-(window or count) :]] = True
    key, value = (each[:count].repeat_interleave(HEADS // GROUPS, dim=1) for each in (key, value))
    logits = torch.einsum("qhd,khd->hqk", query[:count], key) * SCALE
    logits = logits.masked_fill(~allowed, -torch.inf)
    if sinks is not None:
        logits = torch.cat([logits, sinks[:, None, None].expand(-1, count, 1)], dim=-1)
    return torch.einsum("hqk,khd->qhd", logits.softmax(-1)[..., :count], value)


@pytest.mark.parametrize("kind", [PaddedAttention, VarlenAttention])
@given(forest=forests(), window=st.none() | st.integers(1, 12), has_sinks=st.booleans())
def test_values_and_gradients_are_those_of_a_dense_mask(
    kind: Kind, forest: Forest, window: int | None, has_sinks: bool
) -> None:
    count = forest.num_tokens
    weights = torch.randn(count, HEADS, VALUE_SIZE, dtype=torch.float64)
    tensors, expected = inputs(count + NUM_UNUSED), inputs(count + NUM_UNUSED)
    both = [some_sinks(), some_sinks()] if has_sinks else [None, None]
    found = kind.of(forest, count + NUM_UNUSED).attend(*tensors, SCALE, window, both[0])
    assert found.shape == (count + NUM_UNUSED, HEADS, VALUE_SIZE)
    wanted = with_a_mask(forest, *expected, window, both[1])
    torch.testing.assert_close(found[:count], wanted)
    (found[:count] * weights).sum().backward()
    (wanted * weights).sum().backward()
    for one, other in [*zip(tensors, expected, strict=True), both]:
        if one is not None and other is not None:
            torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.parametrize("kind", [PaddedAttention, VarlenAttention])
@given(forest=forests(), num_ranks=st.integers(2, 3), window=st.none() | st.integers(1, 12))
def test_context_ranks_together_compute_what_one_does(
    kind: Kind, forest: Forest, num_ranks: int, window: int | None
) -> None:
    num_slots = round_up(forest.num_tokens, 2 * num_ranks)
    query, key, value = inputs(num_slots)
    own = [context_positions(num_slots, rank, num_ranks) for rank in range(num_ranks)]
    by_rank = [torch.cat([each[slots] for slots in own]) for each in (key, value)]
    found = torch.zeros(num_slots, HEADS, VALUE_SIZE, dtype=torch.float64)
    for rank, slots in enumerate(own):
        attention = kind.of(forest, num_slots, ContextRank(rank, num_ranks))
        found[slots] = attention.attend(query[slots], *by_rank, SCALE, window)
    wanted = with_a_mask(forest, query, key, value, window)
    torch.testing.assert_close(found[: forest.num_tokens], wanted)


@given(forest=forests(max_runs=12), keys=st.integers(1, 30), queries=st.integers(1, 4))
def test_many_small_calls_give_the_same(forest: Forest, keys: int, queries: int) -> None:
    tensors = inputs(forest.num_tokens)
    whole = PaddedAttention.of(forest, forest.num_tokens)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forest_attention, "_KEYS_PER_CALL", keys)
        patch.setattr(forest_attention, "_QUERIES_PER_MASK", queries)
        patch.setattr(forest_attention, "_PAIRS_OF_A_CALL", 0)
        cut = PaddedAttention.of(forest, forest.num_tokens)
    assert all(call.keys.numel() <= max(keys, call.keys.shape[1]) for call in cut.calls)
    assert all(call.is_causal or call.queries.shape[1] <= queries for call in cut.calls)
    torch.testing.assert_close(cut.attend(*tensors, SCALE), whole.attend(*tensors, SCALE))


def test_slots_by_hand() -> None:
    """A prompt of two tokens, one answer of two and one of one; the row has a slot more than tokens."""
    forest = Forest((TokenRun(2), TokenRun(2, 1), TokenRun(1, 1)))
    padded, packed = PaddedAttention.of(forest, 6), VarlenAttention.of(forest, 6)
    prompt, answers = padded.calls
    assert (prompt.queries.tolist(), prompt.keys.tolist()) == ([[0, 1]], [[0, 1]])
    assert (prompt.num_earlier.tolist(), prompt.is_causal) == ([0], True)
    assert answers.queries.tolist() == [[4, 5], [2, 3]]  # slot 5 is padding
    assert answers.keys.tolist() == [[0, 1, 4, 0], [0, 1, 2, 3]]
    assert (answers.num_earlier.tolist(), answers.is_causal) == ([2], False)
    assert padded.output_index[:5].tolist() == [0, 1, 4, 5, 2]
    assert packed.seen.tolist() == [0, 1, 0, 1, 2, 3, 0, 1, 4]
    assert packed.sequences.cu_queries.tolist() == [0, 2, 4, 5]
    assert packed.sequences.cu_keys.tolist() == [0, 2, 6, 9]


def test_no_tensor_grows_with_the_square_of_a_path() -> None:
    sizes = []
    for length in (1024, 2048):  # of the prompt, and of what follows it in either sample
        forest = Forest((TokenRun(length, ROOT), TokenRun(length, length - 1), TokenRun(length, length - 1)))
        heads = (HEADS, GROUPS, GROUPS)
        tensors = [torch.randn(3 * length, count, HEAD_SIZE, requires_grad=True) for count in heads]
        attend: Callable[..., Tensor] = PaddedAttention.of(forest, 3 * length).attend
        sizes.append(largest(*tensors, lambda *qkv, attend=attend: attend(*qkv, SCALE)))
    # The mask of the latest queries of a sample, which the samples have in common.
    assert sizes == [512 * 2 * 1024, 512 * 2 * 2048]
