"""Column values to bytes and back."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from nemo_like.batch.columns import Column, Layout
from nemo_like.data_plane import codec

RAGGED = Column("images", "", Layout.ragged)
OBJECTS = Column("extra", "", Layout.objects)
TORCH_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.int64, torch.uint8, torch.bool)
NUMPY_DTYPES = ("bool", "uint8", "int8", "int32", "int64", "uint16", "float16", "float32", "float64")

shapes = hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4)
arrays = st.sampled_from(NUMPY_DTYPES).flatmap(lambda dtype: hnp.arrays(dtype, shapes))
tensors = st.tuples(st.sampled_from(TORCH_DTYPES), shapes).map(
    lambda pair: torch.arange(math.prod(pair[1])).reshape(pair[1]).to(pair[0])
)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner, inner),
    max_leaves=8,
)


@settings(max_examples=60)
@given(st.lists(st.lists(arrays | tensors, max_size=4), max_size=6))
def test_ragged_rows_survive_exactly(rows: list[list[Any]]) -> None:
    packed = codec.pack_rows(RAGGED, rows)
    assert packed.dtype == np.uint8
    assert codec.num_packed_rows(packed) == len(rows)
    for index, expected in enumerate(rows):
        got = codec.unpack_row(RAGGED, packed, index)
        assert len(got) == len(expected)
        for tensor, original in zip(got, expected, strict=True):
            assert type(tensor) is type(original)
            assert tensor.dtype == original.dtype
            assert tuple(tensor.shape) == tuple(original.shape)
            assert codec_bytes(tensor) == codec_bytes(original)


def test_an_empty_tensor_without_a_stride_survives() -> None:
    empty = torch.empty(4).as_strided((0,), (0,))
    ((got,),) = [codec.unpack_row(RAGGED, codec.pack_rows(RAGGED, [[empty]]), 0)]
    assert (got.shape, got.dtype) == ((0,), torch.float32)


def codec_bytes(tensor: Any) -> bytes:
    if isinstance(tensor, torch.Tensor):
        return tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return np.ascontiguousarray(tensor).tobytes()


@settings(max_examples=60)
@given(st.lists(values, max_size=6))
def test_objects_survive(rows: list[Any]) -> None:
    packed = codec.pack_rows(OBJECTS, rows)
    assert codec.num_packed_rows(packed) == len(rows)
    assert [codec.unpack_row(OBJECTS, packed, index) for index in range(len(rows))] == rows


def test_arrays_inside_objects_are_not_copied_into_the_pickle() -> None:
    packed = codec.pack_rows(OBJECTS, [{"image": np.arange(100_000)}])
    got = codec.unpack_row(OBJECTS, packed, 0)["image"]
    assert np.shares_memory(got, packed)
    np.testing.assert_array_equal(got, np.arange(100_000))


@pytest.mark.parametrize("order", ["C", "F"])
def test_arrays_in_any_memory_order_survive(order: str) -> None:
    array = np.array(np.arange(12.0).reshape(3, 4), order=order)  # type: ignore[call-overload]
    for column, value in ((RAGGED, [array, array[:, ::2]]), (OBJECTS, [array, array[:, ::2]])):
        got = codec.unpack_row(column, codec.pack_rows(column, [value]), 0)
        np.testing.assert_array_equal(got[0], array)
        np.testing.assert_array_equal(got[1], array[:, ::2])


def test_an_array_that_was_cut_short_has_no_rows() -> None:
    packed = codec.pack_rows(OBJECTS, ["a" * 100, "b" * 100])
    assert codec.num_packed_rows(packed) == 2
    assert codec.num_packed_rows(packed[:-16]) == -1
    assert codec.num_packed_rows(packed[:8]) == -1
    assert codec.num_packed_rows(np.full(64, 255, np.uint8)) == -1


def test_packing_a_dense_column_copies_nothing() -> None:
    column = Column("logprobs", "float32", Layout.per_token)
    values = np.arange(6, dtype=np.float32)
    wire = codec.to_wire(column, values, lengths=(2, 4), num_prompts=1, partition="p")
    assert np.shares_memory(wire, values)
    assert np.shares_memory(codec.from_wire(column, wire), values)
