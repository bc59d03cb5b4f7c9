"""Attention over prompts that samples share: the values and gradients of every sample by itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import varlen

from nemo_like.policy.batch.shared_prompts import PaddedAttention, SharedRow, VarlenAttention
from tests.unit.policy.largest_tensor import largest
from tests.unit.policy.varlen_by_hand import loops_over_sequences

HEADS, GROUPS, HEAD_SIZE, SCALE = 4, 2, 8, 0.3
# Prompts of 3, 1 and 4 tokens, of which the last has no response at all; 2 tokens are unused.
ROW = SharedRow(
    prompt_lengths=torch.tensor([3, 1, 4]),
    run=torch.tensor([0, 0, 0, 1, 1, 2]),
    after_lengths=torch.tensor([2, 0, 5, 1, 3, 0]),
    num_tokens=21,
)
# By hand: the slots of every sample.
SAMPLES = [[0, 1, 2, 8, 9], [0, 1, 2], [0, 1, 2, 10, 11, 12, 13, 14], [3, 15], [3, 16, 17, 18], [4, 5, 6, 7]]
Attend = Callable[[Tensor, Tensor, Tensor, float | None], Tensor]


@pytest.fixture(params=[PaddedAttention, VarlenAttention])
def attend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Attend:
    monkeypatch.setattr(varlen, "varlen_attn", loops_over_sequences)
    attend: Attend = request.param.of(ROW).attend
    return attend


def inputs(value_size: int = HEAD_SIZE) -> list[Tensor]:
    torch.manual_seed(3)
    shapes = ((HEADS, HEAD_SIZE), (GROUPS, HEAD_SIZE), (GROUPS, value_size))
    return [torch.randn(ROW.num_tokens, *shape, requires_grad=True) for shape in shapes]


def by_itself(query: Tensor, key: Tensor, value: Tensor, slots: list[int]) -> Tensor:
    """[L, heads, d]"""
    sample = (each[slots].transpose(0, 1) for each in (query, key, value))
    return functional.scaled_dot_product_attention(
        *sample, is_causal=True, scale=SCALE, enable_gqa=True
    ).transpose(0, 1)


@pytest.mark.parametrize("value_size", [HEAD_SIZE, 6])
def test_every_token_gets_what_it_would_in_its_sample_alone(attend: Attend, value_size: int) -> None:
    query, key, value = inputs(value_size)
    row = attend(query, key, value, SCALE)
    assert row.shape == (ROW.num_tokens, HEADS, value_size)
    for slots in SAMPLES:
        torch.testing.assert_close(row[slots], by_itself(query, key, value, slots))


def test_gradients_are_those_of_the_samples_together(attend: Attend) -> None:
    """A prompt's tokens count once, however many samples look back at them."""
    torch.manual_seed(4)
    used = sorted({slot for slots in SAMPLES for slot in slots})
    weights = torch.zeros(ROW.num_tokens, HEADS, HEAD_SIZE)
    weights[used] = torch.randn(len(used), HEADS, HEAD_SIZE)
    shared, alone = inputs(), inputs()
    (attend(*shared, SCALE) * weights).sum().backward()
    seen: set[int] = set()
    for slots in SAMPLES:
        new = torch.tensor([slot not in seen for slot in slots])
        seen.update(slots)
        (by_itself(*alone, slots) * weights[slots] * new[:, None, None]).sum().backward()
    for found, expected in zip(shared, alone, strict=True):
        torch.testing.assert_close(found.grad, expected.grad)


def test_prompts_alone_need_no_second_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Responses of one token: nothing of them enters the model."""
    monkeypatch.setattr(varlen, "varlen_attn", loops_over_sequences)
    row = SharedRow(torch.tensor([2, 1]), torch.tensor([0, 1, 1]), torch.tensor([0, 0, 0]), 3)
    query, key, value = (each[:3] for each in inputs())
    expected = torch.cat([by_itself(query, key, value, slots) for slots in ([0, 1], [2])])
    for kind in (PaddedAttention, VarlenAttention):
        torch.testing.assert_close(kind.of(row).attend(query, key, value, SCALE), expected)


def test_a_row_that_is_too_short_is_refused() -> None:
    with pytest.raises(ValueError, match="prompts and responses of 19 tokens do not fit into 18"):
        SharedRow(ROW.prompt_lengths, ROW.run, ROW.after_lengths, 18)


def test_no_tensor_grows_with_the_square_of_a_sample() -> None:
    sizes = []
    for length in (256, 512):  # of the prompt, and of what follows it in either sample
        after = torch.tensor([length, length])
        row = SharedRow(torch.tensor([length]), torch.tensor([0, 0]), after, 3 * length)
        heads = (HEADS, GROUPS, GROUPS)
        tensors = [torch.randn(3 * length, size, HEAD_SIZE, requires_grad=True) for size in heads]
        attend = PaddedAttention.of(row).attend
        sizes.append(largest(*tensors, lambda *qkv, attend=attend: attend(*qkv, SCALE)))
    # Queries of both samples, with their prompt; a mask would have as many elements as there are pairs.
    assert sizes == [2 * 512 * HEADS * HEAD_SIZE, 2 * 1024 * HEADS * HEAD_SIZE]
