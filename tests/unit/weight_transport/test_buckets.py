"""The bucket plan that sender and receivers derive from the same list of tensors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.weight_transport.buckets import ALIGNMENT_BYTES, TensorSpec, plan_buckets

specs = st.lists(
    st.tuples(
        st.sampled_from(["float32", "bfloat16", "int64", "uint8"]),
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
    ),
    max_size=12,
).map(lambda items: [TensorSpec(f"t{i}", dtype, shape) for i, (dtype, shape) in enumerate(items)])


def test_offsets_are_aligned_and_a_bucket_holds_what_fits() -> None:
    # 40 bytes take 64, 128 take 128, 2 take 64: the first two fill a bucket of 192 exactly.
    tensors = [
        TensorSpec("a", "float32", (10,)),
        TensorSpec("b", "bfloat16", (8, 8)),
        TensorSpec("c", "bfloat16", ()),
    ]
    buckets = plan_buckets(tensors, bucket_bytes=192)
    assert [[(slot.spec.name, slot.offset) for slot in bucket.slots] for bucket in buckets] == [
        [("a", 0), ("b", 64)],
        [("c", 0)],
    ]
    assert [bucket.num_bytes for bucket in buckets] == [192, 64]


def test_a_tensor_larger_than_a_bucket_gets_its_own() -> None:
    tensors = [TensorSpec(name, "uint8", (size,)) for name, size in [("a", 64), ("big", 1000), ("b", 64)]]
    assert [bucket.num_bytes for bucket in plan_buckets(tensors, bucket_bytes=128)] == [64, 1024, 64]


@given(tensors=specs, bucket_bytes=st.integers(1, 2000))
def test_every_tensor_has_one_slot_in_order_and_slots_do_not_overlap(
    tensors: list[TensorSpec], bucket_bytes: int
) -> None:
    buckets = plan_buckets(tensors, bucket_bytes)
    assert [slot.spec for bucket in buckets for slot in bucket.slots] == tensors
    for bucket in buckets:
        assert len(bucket.slots) == 1 or bucket.num_bytes <= bucket_bytes
        ends = [0, *(slot.offset + slot.spec.num_bytes for slot in bucket.slots)]
        for slot, previous_end in zip(bucket.slots, ends, strict=False):
            assert slot.offset % ALIGNMENT_BYTES == 0
            assert slot.offset >= previous_end
        assert bucket.num_bytes >= ends[-1]


def test_a_name_that_occurs_twice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"named twice: \['w'\]"):
        plan_buckets([TensorSpec("w", "float32", (1,)), TensorSpec("w", "float32", (2,))], 64)


def test_a_dtype_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(ValueError, match="dtype='complex64'"):
        plan_buckets([TensorSpec("w", "complex64", (1,))], 64)
