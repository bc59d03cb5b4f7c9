from __future__ import annotations

import pytest
import torch

from nemo_like.weight_transport.changes import ChangeDecoder, ChangeEncoder
from nemo_like.weight_transport.packing import spec_of

Named = tuple[str, torch.Tensor]


def decoded(decoder: ChangeDecoder, encoded: list[Named]) -> list[Named]:
    """What a receiver gets of parts of two tensors each."""
    parts = [encoded[start : start + 2] for start in range(0, len(encoded), 2)]
    return [tensor for part in decoder.decode(iter(parts)) for tensor in part]


def assert_same(found: list[Named], expected: list[Named]) -> None:
    for (name, value), (expected_name, expected_value) in zip(found, expected, strict=True):
        assert name == expected_name
        assert value.dtype == expected_value.dtype
        assert value.shape == expected_value.shape
        assert value.view(torch.uint8).equal(expected_value.view(torch.uint8))


def copies(values: list[Named]) -> list[Named]:
    return [(name, value.clone()) for name, value in values]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_what_arrives_is_what_was_sent_to_the_bit_whatever_changed(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = [(f"t{i}", torch.randn(40, 3, generator=generator).to(dtype)) for i in range(5)]
    encoder, decoder = ChangeEncoder(), ChangeDecoder([spec_of(*value) for value in values])
    for changed_share in (1.0, 0.0, 0.05, 0.2, 0.3, 0.6, 1.0, 0.01):
        for _, value in values:
            chosen = torch.rand(value.shape, generator=generator) < changed_share
            fresh = torch.randn(value.shape, generator=generator).to(dtype)
            value.copy_(torch.where(chosen, fresh.float(), value.float()).to(dtype))
        assert_same(decoded(decoder, copies(list(encoder.encode(iter(values))))), values)


def test_only_what_changed_is_sent() -> None:
    first, second = torch.zeros(12), torch.zeros(4)
    encoder = ChangeEncoder()
    assert [name for name, _ in encoder.encode(iter([("a", first), ("b", second)]))] == ["a", "b"]
    assert (encoder.num_changed, encoder.num_values) == (16, 16)
    first[7] = 1.0
    [(name, indexes), (values_name, values)] = encoder.encode(iter([("a", first), ("b", second)]))
    assert (name, values_name) == ("a::indexes", "a::values")
    assert indexes.dtype == torch.int32
    assert indexes.tolist() == [7]
    assert values.tolist() == [1.0]
    assert (encoder.num_changed, encoder.num_values) == (1, 16)


# An index takes four bytes, a value of float32 four and one of bfloat16 two.
@pytest.mark.parametrize(
    ("dtype", "num_values", "largest_part"), [(torch.float32, 12, 5), (torch.bfloat16, 12, 3)]
)
def test_a_tensor_is_sent_whole_when_that_is_less(
    dtype: torch.dtype, num_values: int, largest_part: int
) -> None:
    for num_changed in range(1, num_values + 1):
        encoder, value = ChangeEncoder(), torch.zeros(num_values, dtype=dtype)
        list(encoder.encode(iter([("a", value)])))
        value[:num_changed] = 1.0
        names = [name for name, _ in encoder.encode(iter([("a", value)]))]
        assert names == (["a::indexes", "a::values"] if num_changed <= largest_part else ["a"])


def test_a_sign_of_zero_is_a_change_and_a_nan_that_stays_is_none() -> None:
    value = torch.tensor([0.0, float("nan"), 1.0, 2.0])
    encoder = ChangeEncoder()
    list(encoder.encode(iter([("a", value)])))
    value[0] = -0.0
    [(_, indexes), _] = encoder.encode(iter([("a", value)]))
    assert indexes.tolist() == [0]


def test_what_was_forgotten_is_sent_whole() -> None:
    encoder, value = ChangeEncoder(), torch.zeros(4)
    list(encoder.encode(iter([("a", value)])))
    assert list(encoder.encode(iter([("a", value)]))) == []
    encoder.forget()
    assert [name for name, _ in encoder.encode(iter([("a", value)]))] == ["a"]


def test_changes_of_a_tensor_that_the_receiver_does_not_hold_are_refused() -> None:
    encoder, value = ChangeEncoder(), torch.zeros(4)
    list(encoder.encode(iter([("a", value)])))
    decoder = ChangeDecoder([spec_of("a", value)])
    with pytest.raises(RuntimeError, match="'a' was never sent whole"):
        list(decoder.decode(iter([])))
