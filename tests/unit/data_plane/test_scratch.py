"""Memory that is used again, and only when nobody can read it any more."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_like.data_plane.scratch import Scratch


def pieces(*lengths: int, dtype: str = "float32") -> list[np.ndarray]:
    return [np.arange(length * 2, dtype=dtype).reshape(length, 2) for length in lengths]


def test_joined_pieces_are_their_concatenation() -> None:
    scratch = Scratch()
    for lengths in ((3, 0, 2), (1, 1), (7, 4), (0, 0)):
        for dtype in ("float32", "uint8"):
            with scratch.joining() as join:
                joined = join(pieces(*lengths, dtype=dtype))
                np.testing.assert_array_equal(joined, np.concatenate(pieces(*lengths, dtype=dtype)))
                assert joined.dtype == dtype


def test_a_put_uses_the_memory_of_the_one_before() -> None:
    scratch = Scratch()
    with scratch.joining() as join:
        first, second = join(pieces(8, 8)), join(pieces(2, 2))
        assert not np.shares_memory(first, second)
    with scratch.joining() as join:
        small, large = join(pieces(1, 2)), join(pieces(7, 7))
        assert np.shares_memory(small, second)
        assert np.shares_memory(large, first)


def test_memory_that_somebody_may_still_read_is_not_used_again() -> None:
    scratch = Scratch()
    with pytest.raises(ValueError, match="given up"), scratch.joining() as join:
        lost = join(pieces(4, 4))
        raise ValueError("given up")
    with scratch.joining() as join, scratch.joining() as join_at_once:
        one, other = join(pieces(4, 4)), join_at_once(pieces(4, 4))
        assert not np.shares_memory(one, lost)
        assert not np.shares_memory(one, other)
