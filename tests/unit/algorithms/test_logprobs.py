"""Log-probs from hidden states against the plain softmax, and what they hold in memory."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from nemo_like.algorithms.logprobs import (
    LogprobSettings,
    TokenScores,
    VocabularyShard,
    linear_scores,
    most_likely_ids,
    scores_with_most_likely,
)

NUM_TOKENS, HIDDEN, VOCABULARY = 40, 8, 50


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(NUM_TOKENS, HIDDEN, generator=generator).requires_grad_()
    weight = torch.randn(VOCABULARY, HIDDEN, generator=generator).requires_grad_()
    return hidden, weight, torch.randint(0, VOCABULARY, (NUM_TOKENS,), generator=generator)


def whole(num_valid: int = VOCABULARY) -> VocabularyShard:
    return VocabularyShard(first=0, num_valid=num_valid, group=None)


def plain_logprobs(hidden: Tensor, weight: Tensor, token_ids: Tensor, temperature: float) -> Tensor:
    logits = hidden @ weight.t() / temperature
    return torch.log_softmax(logits, -1).gather(1, token_ids[:, None])[:, 0]


@pytest.mark.parametrize("chunk_tokens", [1, 7, NUM_TOKENS, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_equal_the_plain_softmax_for_every_chunk_size(
    chunk_tokens: int, temperature: float
) -> None:
    settings = LogprobSettings(temperature=temperature, max_chunk_bytes=4 * VOCABULARY * chunk_tokens)
    hidden, weight, token_ids = inputs()
    other_hidden, other_weight, _ = inputs()
    ours = linear_scores(hidden, weight, token_ids, whole(), settings).logprobs
    plain = plain_logprobs(other_hidden, other_weight, token_ids, temperature)
    slope = torch.linspace(-1, 1, NUM_TOKENS)
    ours.backward(slope)
    plain.backward(slope)
    torch.testing.assert_close(ours, plain)
    torch.testing.assert_close(hidden.grad, other_hidden.grad)
    torch.testing.assert_close(weight.grad, other_weight.grad)


def plain_entropy(hidden: Tensor, weight: Tensor, temperature: float) -> Tensor:
    logprobs = torch.log_softmax(hidden @ weight.t() / temperature, -1)
    return -(logprobs.exp() * logprobs).sum(-1)


@pytest.mark.parametrize("chunk_tokens", [1, 7, NUM_TOKENS])
def test_entropy_and_its_gradient_equal_the_plain_softmax_beside_those_of_the_logprobs(
    chunk_tokens: int,
) -> None:
    settings = LogprobSettings(
        temperature=0.7, with_entropy=True, max_chunk_bytes=4 * VOCABULARY * chunk_tokens
    )
    hidden, weight, token_ids = inputs()
    other_hidden, other_weight, _ = inputs()
    ours = linear_scores(hidden, weight, token_ids, whole(), settings)
    logprobs = plain_logprobs(other_hidden, other_weight, token_ids, 0.7)
    entropy = plain_entropy(other_hidden, other_weight, 0.7)
    slope, other_slope = torch.linspace(-1, 1, NUM_TOKENS), torch.linspace(2, 0.5, NUM_TOKENS)
    torch.autograd.backward((ours.logprobs, ours.entropy), (slope, other_slope))
    torch.autograd.backward((logprobs, entropy), (slope, other_slope))
    torch.testing.assert_close(ours.logprobs, logprobs)
    torch.testing.assert_close(ours.entropy, entropy)
    torch.testing.assert_close(hidden.grad, other_hidden.grad)
    torch.testing.assert_close(weight.grad, other_weight.grad)


def test_entropy_alone_has_a_gradient() -> None:
    hidden, weight, token_ids = inputs()
    other_hidden, other_weight, _ = inputs()
    settings = LogprobSettings(temperature=1.0, with_entropy=True)
    linear_scores(hidden, weight, token_ids, whole(), settings).entropy.sum().backward()
    plain_entropy(other_hidden, other_weight, 1.0).sum().backward()
    torch.testing.assert_close(hidden.grad, other_hidden.grad)


def test_entropy_by_hand() -> None:
    # Logits 0 and log 3: probabilities 1/4 and 3/4.
    weight = torch.tensor([[0.0], [math.log(3)]])
    settings = LogprobSettings(temperature=1.0, with_entropy=True)
    scores = linear_scores(torch.ones(1, 1), weight, torch.tensor([1]), whole(2), settings)
    assert scores.logprobs.item() == pytest.approx(math.log(3 / 4))
    assert scores.entropy.item() == pytest.approx(math.log(4) - 3 / 4 * math.log(3))


def test_entropy_is_left_out_unless_asked_for() -> None:
    hidden, weight, token_ids = inputs()
    assert linear_scores(hidden, weight, token_ids, whole(), LogprobSettings(temperature=1.0)).entropy is None


def test_padded_rows_of_the_vocabulary_take_no_probability() -> None:
    hidden, weight, token_ids = inputs()
    token_ids = token_ids % 30
    ours = linear_scores(
        hidden, weight, token_ids, whole(num_valid=30), LogprobSettings(temperature=1.0)
    ).logprobs
    torch.testing.assert_close(ours, plain_logprobs(hidden, weight[:30], token_ids, 1.0))
    ours.sum().backward()
    assert weight.grad[30:].abs().max() == 0


def test_no_token_to_score_gives_an_empty_result_and_zero_gradients() -> None:
    hidden, weight, _ = inputs()
    none = torch.empty(0, dtype=torch.int64)
    settings = LogprobSettings(temperature=1.0, with_entropy=True)
    scores = linear_scores(hidden[:0], weight, none, whole(), settings)
    (scores.logprobs.sum() + scores.entropy.sum()).backward()
    assert weight.grad.abs().max() == 0


class LargestTensor(TorchDispatchMode):
    """Remembers the bytes of the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.num_bytes = max(self.num_bytes, tensor.numel() * tensor.element_size())
        return result


def test_no_tensor_is_larger_than_a_chunk_of_logits_forward_and_backward() -> None:
    num_tokens, vocabulary = 512, 1000
    hidden = torch.randn(num_tokens, HIDDEN, requires_grad=True)
    weight = torch.randn(vocabulary, HIDDEN, requires_grad=True)
    settings = LogprobSettings(temperature=1.0, with_entropy=True, max_chunk_bytes=64 * vocabulary * 4)
    with LargestTensor() as largest:
        token_ids = torch.zeros(num_tokens, dtype=torch.int64)
        scores = linear_scores(hidden, weight, token_ids, whole(vocabulary), settings)
        (scores.logprobs.sum() + scores.entropy.sum()).backward()
    assert 0 < largest.num_bytes <= settings.max_chunk_bytes
    assert largest.num_bytes * 8 <= num_tokens * vocabulary * 4


@pytest.mark.parametrize("first", [0, 20])
def test_forbidden_tokens_take_no_probability_and_no_gradient(first: int) -> None:
    hidden, weight, token_ids = inputs()
    other_hidden, other_weight, _ = inputs()
    forbidden = (4, 31)
    token_ids[token_ids == 4] = token_ids[token_ids == 31] = 5
    shard = VocabularyShard(first=first, num_valid=VOCABULARY, group=None)
    settings = LogprobSettings(
        temperature=0.7, with_entropy=True, forbidden_ids=tuple(token + first for token in forbidden)
    )
    ours = linear_scores(hidden, weight, token_ids + first, shard, settings)
    kept = [token for token in range(VOCABULARY) if token not in forbidden]
    logprobs = torch.log_softmax((other_hidden @ other_weight.t() / 0.7)[:, kept], -1)
    place = torch.tensor([kept.index(token) for token in token_ids.tolist()])
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    plain = logprobs.gather(1, place[:, None])[:, 0]
    assert ours.entropy is not None
    torch.testing.assert_close(ours.logprobs, plain)
    torch.testing.assert_close(ours.entropy, entropy)
    (ours.logprobs.sum() + ours.entropy.sum()).backward()
    (plain.sum() + entropy.sum()).backward()
    torch.testing.assert_close(hidden.grad, other_hidden.grad)
    torch.testing.assert_close(weight.grad, other_weight.grad)


def given_ids(k: int) -> Tensor:
    """[NUM_TOKENS, k] int64; ids repeat, within a row too."""
    return torch.randint(0, VOCABULARY, (NUM_TOKENS, k), generator=torch.Generator().manual_seed(8))


@pytest.mark.parametrize("chunk_tokens", [1, 7, NUM_TOKENS])
def test_logprobs_of_given_ids_and_their_gradients_equal_the_plain_softmax(chunk_tokens: int) -> None:
    settings = LogprobSettings(
        temperature=0.7, with_entropy=True, max_chunk_bytes=4 * VOCABULARY * chunk_tokens
    )
    hidden, weight, token_ids = inputs()
    other_hidden, other_weight, _ = inputs()
    topk_ids = given_ids(5)
    ours = linear_scores(hidden, weight, token_ids, whole(), settings, topk_ids)
    logprobs = torch.log_softmax(other_hidden @ other_weight.t() / 0.7, -1)
    plain = logprobs.gather(1, token_ids[:, None])[:, 0]
    plain_topk = logprobs.gather(1, topk_ids)
    entropy = plain_entropy(other_hidden, other_weight, 0.7)
    slopes = (
        torch.linspace(-1, 1, NUM_TOKENS),
        torch.linspace(2, 0.5, NUM_TOKENS),
        torch.linspace(-3, 1, NUM_TOKENS * 5).view(NUM_TOKENS, 5),
    )
    assert ours.topk_logprobs is not None
    torch.testing.assert_close(ours.logprobs, plain)
    torch.testing.assert_close(ours.topk_logprobs, plain_topk)
    torch.autograd.backward((ours.logprobs, ours.entropy, ours.topk_logprobs), slopes)
    torch.autograd.backward((plain, entropy, plain_topk), slopes)
    torch.testing.assert_close(hidden.grad, other_hidden.grad)
    torch.testing.assert_close(weight.grad, other_weight.grad)


def test_in_float64_all_gradients_agree_with_finite_differences() -> None:
    hidden, weight, token_ids = (tensor[:4].detach() for tensor in inputs())
    topk_ids = torch.tensor([[0, 3], [1, 1], [2, 0], [3, 1]])
    settings = LogprobSettings(temperature=0.5, with_entropy=True)

    def scores(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        found = linear_scores(hidden, weight, token_ids % 4, whole(4), settings, topk_ids)
        assert found.entropy is not None
        assert found.topk_logprobs is not None
        return found.logprobs, found.entropy, found.topk_logprobs

    both = (hidden.double().requires_grad_(), weight.double().requires_grad_())
    assert torch.autograd.gradcheck(scores, both)


def test_given_ids_by_hand() -> None:
    # Logits 0, log 3 and log 4: probabilities 1/8, 3/8 and 4/8.
    weight = torch.tensor([[0.0], [math.log(3)], [math.log(4)]])
    topk_ids = torch.tensor([[2, 0]])
    scores = linear_scores(
        torch.ones(1, 1), weight, torch.tensor([1]), whole(3), LogprobSettings(temperature=1.0), topk_ids
    )
    assert scores.logprobs.tolist() == pytest.approx([math.log(3 / 8)])
    assert scores.topk_logprobs is not None
    assert scores.topk_logprobs.tolist() == [pytest.approx([math.log(4 / 8), math.log(1 / 8)])]


def test_without_given_ids_there_are_no_logprobs_of_them() -> None:
    hidden, weight, token_ids = inputs()
    settings = LogprobSettings(temperature=1.0)
    assert linear_scores(hidden, weight, token_ids, whole(), settings).topk_logprobs is None


@pytest.mark.parametrize("chunk_tokens", [1, 7, NUM_TOKENS])
@pytest.mark.parametrize("k", [1, 6, VOCABULARY])
def test_the_most_likely_ids_are_those_of_a_sort(k: int, chunk_tokens: int) -> None:
    hidden, weight, _ = inputs()
    settings = LogprobSettings(temperature=0.7, max_chunk_bytes=4 * VOCABULARY * chunk_tokens)
    found = most_likely_ids(hidden, weight, k, whole(), settings)
    assert found.dtype == torch.int64
    assert torch.equal(found, (hidden @ weight.t()).argsort(dim=1, descending=True)[:, :k])


def test_of_equally_likely_tokens_the_lower_ids_are_taken_and_come_first() -> None:
    # Logits 1, 2, 1, 2, 1, and 9 for a forbidden token that would have been the first.
    weight = torch.tensor([[1.0], [2.0], [1.0], [2.0], [1.0], [9.0]])
    settings = LogprobSettings(temperature=1.0, forbidden_ids=(5,))
    found = most_likely_ids(torch.ones(1, 1), weight, 4, whole(6), settings)
    assert found.tolist() == [[1, 3, 0, 2]]


def test_padded_rows_are_no_likely_tokens_and_more_than_there_are_is_an_error() -> None:
    hidden, weight, _ = inputs()
    settings = LogprobSettings(temperature=1.0)
    assert int(most_likely_ids(hidden, weight, 30, whole(30), settings).max()) == 29
    with pytest.raises(ValueError, match="fewer than 31 tokens"):
        most_likely_ids(hidden, weight, 31, whole(30), settings)


def test_a_logit_that_is_not_a_number_is_an_error() -> None:
    hidden, weight, _ = inputs()
    with torch.no_grad():
        weight[3] = torch.nan
    with pytest.raises(ValueError, match="a logit is not a number"):
        most_likely_ids(hidden, weight, 3, whole(), LogprobSettings(temperature=1.0))


def test_the_most_likely_tokens_come_with_their_own_logprobs() -> None:
    hidden, weight, token_ids = (tensor.detach() for tensor in inputs())
    settings = LogprobSettings(temperature=0.7, top_k=3)
    scores = scores_with_most_likely(hidden, weight, token_ids, whole(), settings)
    expected = torch.log_softmax(hidden @ weight.t() / 0.7, -1).topk(3)
    assert scores.topk_ids is not None and scores.topk_logprobs is not None
    torch.testing.assert_close(scores.topk_logprobs, expected.values)
    assert torch.equal(scores.topk_ids, expected.indices)
    torch.testing.assert_close(scores.logprobs, plain_logprobs(hidden, weight, token_ids, 0.7))


@pytest.mark.parametrize("left_out", [(), ("entropy",), ("topk_ids",), ("topk_logprobs", "topk_ids")])
def test_scores_can_be_taken_apart_into_tensors_and_put_together_again(left_out: tuple[str, ...]) -> None:
    fields = {
        "logprobs": torch.rand(2),
        "entropy": torch.rand(2),
        "topk_logprobs": torch.rand(2, 3),
        "topk_ids": torch.randint(9, (2, 3)),
    }
    scores = TokenScores(**{name: value for name, value in fields.items() if name not in left_out})
    again = TokenScores.of(scores.tensors)
    assert all(getattr(again, name) is getattr(scores, name) for name in fields)
