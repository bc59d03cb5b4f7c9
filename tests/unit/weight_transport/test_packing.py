from __future__ import annotations

import pytest
import torch

from nemo_like.weight_transport.buckets import (
    ALIGNMENT_BYTES,
    Piece,
    TensorSpec,
    check_names,
    from_lists,
    to_lists,
)
from nemo_like.weight_transport.packing import Assembler, as_announced, pack, spec_of, view

CPU = torch.device("cpu")
VALUES = [
    ("a.weight", torch.randn(33, 7)),
    ("b.weight", torch.randn(5).bfloat16()),
    ("c.scale", torch.tensor(2.5)),
    ("d.ids", torch.arange(6).view(2, 3).T),  # not contiguous
    ("e.empty", torch.empty(0, 4)),
    ("f.mask", torch.tensor([True, False])),
]


@pytest.mark.parametrize("bucket_bytes", [1, 100, 128, 1 << 16])
def test_whatever_the_size_of_the_buckets_the_tensors_come_together_again(bucket_bytes: int) -> None:
    assembler = Assembler(CPU)
    numbers: list[int] = []
    buffers = [torch.empty(bucket_bytes, dtype=torch.uint8) for _ in range(2)]

    def buffer(number: int) -> torch.Tensor:
        numbers.append(number)
        return buffers[number % 2]

    found = []
    for pieces, bucket in pack(VALUES, buffer):
        assert len(bucket) <= bucket_bytes
        found += assembler.add(from_lists(to_lists(pieces)), bucket)
    assert numbers == list(range(len(numbers)))
    assert (len(numbers) == 1) == (bucket_bytes == 1 << 16)
    for (name, tensor), (expected_name, expected) in zip(found, VALUES, strict=True):
        assert name == expected_name
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected)


def test_a_tensor_begins_where_any_dtype_can_be_viewed_in_place() -> None:
    [(pieces, bucket)] = pack(VALUES, lambda _: torch.empty(1 << 16, dtype=torch.uint8))
    assert all(piece.offset % ALIGNMENT_BYTES == 0 for piece in pieces)
    assert torch.equal(view(bucket, pieces[0]), VALUES[0][1])


def test_a_tensor_of_300_bytes_lies_in_three_buckets_of_128() -> None:
    spec = TensorSpec("w", "uint8", (300,))
    packed = list(pack([("w", torch.zeros(300).to(torch.uint8))], lambda _: torch.empty(128).to(torch.uint8)))
    assert [pieces for pieces, _ in packed] == [
        [Piece(spec, 0, 0, 128)],
        [Piece(spec, 128, 0, 128)],
        [Piece(spec, 256, 0, 44)],
    ]


def test_nothing_is_packed_into_no_bucket() -> None:
    assert list(pack([], lambda _: pytest.fail("a buffer was asked for"))) == []


def test_values_that_were_not_announced_are_refused() -> None:
    announced = [spec_of(name, value) for name, value in VALUES]
    assert [name for name, _ in as_announced(VALUES, announced)] == [name for name, _ in VALUES]
    with pytest.raises(ValueError, match=r"got .*'b.weight'.* announced at connect time was .*'a.weight'"):
        list(as_announced([VALUES[1], VALUES[0]], announced))
    with pytest.raises(ValueError, match=r"got .*'nothing'"):
        list(as_announced(VALUES[:-1], announced))
    with pytest.raises(ValueError, match=r"got 'g' to send, which was not announced"):
        list(as_announced([*VALUES, ("g", torch.ones(1))], announced))


def test_a_dtype_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(ValueError, match=r"tensor 'z': dtype='complex64' is not one of"):
        assert TensorSpec("z", "complex64", (2,)).num_bytes


def test_a_name_that_occurs_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"named twice: \['w'\]"):
        check_names([TensorSpec("w", "float32", (1,)), TensorSpec("w", "float32", (2,))])
