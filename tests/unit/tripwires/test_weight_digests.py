"""A digest of weights differs where one bit does, or where values change places."""

from __future__ import annotations

import pytest
import torch

from nemo_like.tripwires.weight_digests import WeightsDigest, word_sum

torch.manual_seed(0)
WEIGHTS = {"a": torch.randn(6, 6), "b": torch.randn(7), "c": torch.randn(5, 3).bfloat16()}


def digest(tensors: dict[str, torch.Tensor]) -> int:
    one = WeightsDigest()
    one.add_all(tensors.items())
    return one.value()


def test_the_same_values_give_the_same_digest_whatever_their_order_or_strides() -> None:
    other = {name: WEIGHTS[name].clone() for name in reversed(WEIGHTS)}
    other["a"] = WEIGHTS["a"].t().contiguous().t()
    assert digest(other) == digest(WEIGHTS)
    assert 0 < digest(WEIGHTS) < 2**47


def next_after(values: torch.Tensor) -> torch.Tensor:
    """The values, with one of them larger by its last bit."""
    values = values.clone()
    values.view(torch.int32).view(-1)[3] += 1
    return values


@pytest.mark.parametrize(
    "changed",
    [
        {"a": WEIGHTS["a"].t()},
        {"a": WEIGHTS["a"].flip(0)},
        {"a": WEIGHTS["a"].bfloat16().float()},
        {"a": next_after(WEIGHTS["a"])},
        {"a": -WEIGHTS["a"]},
        {"a": WEIGHTS["a"].view(4, 9)},
        {"b": WEIGHTS["b"].roll(1)},
        {"c": WEIGHTS["c"].flip(1)},
        {"c": WEIGHTS["c"].float()},
        {"d": WEIGHTS["a"]},
    ],
)
def test_any_change_gives_another_digest(changed: dict[str, torch.Tensor]) -> None:
    assert digest({**WEIGHTS, **changed}) != digest(WEIGHTS)


def test_two_tensors_that_change_places_give_another_digest() -> None:
    square = {"k": torch.randn(4, 4), "v": torch.randn(4, 4)}
    assert digest({"k": square["v"], "v": square["k"]}) != digest(square)


def test_pieces_of_a_large_tensor_cannot_change_places() -> None:
    large = torch.arange(2**20, dtype=torch.int32)
    halves = torch.cat((large[2**19 :], large[: 2**19]))
    assert word_sum(large) != word_sum(halves)


def test_a_part_of_a_larger_tensor_counts_as_its_values() -> None:
    whole = torch.arange(9, dtype=torch.float32)
    assert word_sum(whole[1:]) == word_sum(whole[1:].clone())
    assert word_sum(whole[3:5]) == word_sum(torch.tensor([3.0, 4.0]))


def test_what_passes_by_is_taken_in_and_no_tensor_gives_0() -> None:
    one = WeightsDigest()
    assert one.value() == 0
    assert [name for name, _ in one.watching(iter(WEIGHTS.items()))] == ["a", "b", "c"]
    assert one.value() == digest(WEIGHTS)
