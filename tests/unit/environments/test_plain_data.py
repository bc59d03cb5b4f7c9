"""Values that pass between a program and its tests."""

from __future__ import annotations

import io
import json
from collections import Counter, namedtuple
from enum import IntEnum
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nemo_like.environments.sandboxed.plain_data import (
    MAX_FRAME_BYTES,
    NotPlain,
    decode,
    encode,
    lenient,
    read_frame,
    strict,
    write_frame,
)

_HASHABLE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
_PLAIN = st.recursive(
    _HASHABLE | st.sets(_HASHABLE, max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(_HASHABLE, inner, max_size=3) | st.tuples(inner)
    ),
    max_leaves=10,
)


def through(value: Any) -> Any:
    """The value after the way through a pipe."""
    stream = io.BytesIO()
    write_frame(stream, encode(value, simplify=strict))
    stream.seek(0)
    return decode(read_frame(stream))


@given(_PLAIN)
def test_plain_values_arrive_equal_and_of_the_same_types(value: Any) -> None:
    assert repr(through(value)) == repr(value) or through(value) == value
    assert type(through(value)) is type(value)


def test_iterators_arrive_as_iterators_and_only_where_they_end() -> None:
    assert list(through(x * x for x in range(3))) == [0, 1, 4]
    assert next(through(map(str, [1]))) == "1"
    with pytest.raises(NotPlain, match="iterator without end"):
        encode(iter(range(1_000_001)), simplify=strict)


@pytest.mark.parametrize("value", [object(), print, Counter("a"), np.int64(1), open, [len], {"a": {1: int}}])
def test_tests_pass_nothing_but_exact_plain_types(value: Any) -> None:
    with pytest.raises(NotPlain):
        encode(value, simplify=strict)


class _Colour(IntEnum):
    red = 1


_Point = namedtuple("_Point", "x y")


@pytest.mark.parametrize(
    ("value", "plain"),
    [
        (Counter("aab"), {"a": 2, "b": 1}),
        (_Point(1, 2), (1, 2)),
        (_Colour.red, 1),
        (np.int32(3), 3),
        (np.float32(0.5), 0.5),
        (np.bool_(True), True),
        ([np.float64(0.5)], [0.5]),
    ],
)
def test_what_a_program_returns_is_reduced_to_the_plain_value_that_it_equals(value: Any, plain: Any) -> None:
    decoded = decode(encode(value, simplify=lenient))
    assert decoded == plain
    assert type(decoded) is type(plain)


@pytest.mark.parametrize("value", [object(), len, int, np.zeros(3)])
def test_an_object_of_another_type_is_no_plain_value(value: Any) -> None:
    with pytest.raises(NotPlain):
        encode(value, simplify=lenient)


@pytest.mark.parametrize(
    "tree",
    [{"eval": "1"}, {}, {"int": "1", "set": []}, {"set": [[]]}, {"dict": [1]}, {"bytes": "zz"}, {"set": 3}],
)
def test_a_tree_that_nobody_encoded_is_an_error(tree: Any) -> None:
    with pytest.raises((ValueError, TypeError, KeyError)):
        decode(tree)


def test_a_frame_that_is_too_long_cut_off_or_no_json_is_an_error() -> None:
    def frame(length: int, content: bytes) -> io.BytesIO:
        return io.BytesIO(length.to_bytes(8, "big") + content)

    with pytest.raises(ValueError, match="a frame of"):
        read_frame(frame(MAX_FRAME_BYTES + 1, b""))
    with pytest.raises(EOFError):
        read_frame(frame(10, b"1"))
    with pytest.raises(EOFError):
        read_frame(io.BytesIO(b"\0"))
    with pytest.raises(json.JSONDecodeError):
        read_frame(frame(1, b"x"))
    with pytest.raises(RecursionError):
        read_frame(frame(200_000, b"[" * 200_000))
