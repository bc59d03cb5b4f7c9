from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.nn.attention import varlen
from transformers import PreTrainedConfig

from nemo_like.policy.batch.policy_batch import Packing
from nemo_like.policy.fsdp import attention
from nemo_like.policy.fsdp.attention import causal_attention, has_plain_attention
from tests.unit.policy.varlen_by_hand import loops_over_sequences

LENGTHS = (3, 1, 4)


def heads(num_heads: int, seed: int) -> torch.Tensor:
    """[1, heads, tokens, 8]"""
    return torch.randn(1, num_heads, sum(LENGTHS), 8, generator=torch.Generator().manual_seed(seed))


def by_hand(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
    """One token after the other, over the earlier tokens of its own sample; [1, T, heads, d]."""
    group = query.shape[1] // key.shape[1]
    context = torch.zeros_like(query)
    start = 0
    for length in LENGTHS:
        for token in range(start, start + length):
            for head in range(query.shape[1]):
                seen = slice(start, token + 1)
                scores = key[0, head // group, seen] @ query[0, head, token] * scale
                context[0, head, token] = scores.softmax(0) @ value[0, head // group, seen]
        start += length
    return context.transpose(1, 2)


@pytest.mark.parametrize("has_kernel", [False, True], ids=["a loop", "one kernel"])
def test_packed_samples_attend_to_their_own_earlier_tokens_alone(
    has_kernel: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "has_varlen_kernel", lambda query: has_kernel)
    monkeypatch.setattr(varlen, "varlen_attn", loops_over_sequences)
    query, key, value = heads(4, seed=1), heads(2, seed=2), heads(2, seed=3)
    packing = Packing(cu_seqlens=torch.tensor([0, 3, 4, 8], dtype=torch.int32), lengths=LENGTHS)
    context, weights = causal_attention(None, query, key, value, None, scaling=0.5, packing=packing)
    assert weights is None
    torch.testing.assert_close(context, by_hand(query, key, value, 0.5), rtol=0, atol=1e-6)


def test_an_option_that_changes_the_attention_is_refused() -> None:
    query, key, value = heads(2, seed=1), heads(2, seed=2), heads(2, seed=3)
    with pytest.raises(ValueError, match="asks for sliding_window: not plain attention"):
        causal_attention(None, query, key, value, None, sliding_window=2)


@pytest.mark.parametrize(
    ("config", "is_plain"),
    [
        ({}, True),
        ({"sliding_window": None}, True),
        ({"sliding_window": 4096}, False),
        ({"sliding_window": 4096, "layer_types": ["full_attention"] * 2}, True),
        ({"layer_types": ["full_attention", "sliding_attention"]}, False),
        ({"attn_logit_softcapping": 50.0}, False),
    ],
)
def test_attention_is_plain_when_every_layer_sees_all_earlier_tokens(config: dict, is_plain: bool) -> None:
    model = SimpleNamespace(config=PreTrainedConfig(**config), is_backend_compatible=lambda: True)
    assert has_plain_attention(model) is is_plain
    model.is_backend_compatible = lambda: False
    assert has_plain_attention(model) is False
