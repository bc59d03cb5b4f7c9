"""What a process keeps, and how it hands it out again."""

from __future__ import annotations

import numpy as np
import pytest

from nemo_like.batch.columns import INPUT_IDS
from nemo_like.data_plane.in_memory import InMemoryDataPlane

LENGTHS = (3, 1, 2, 4)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (2, 3, 0, 1), (0, 2, 1, 3), (3, 0, 2, 1)])
def test_samples_wanted_twice_in_one_order_are_copied_once(order: tuple[int, ...]) -> None:
    plane = InMemoryDataPlane()
    plane.open_partition("p", [INPUT_IDS])
    ids = np.arange(10, dtype=np.int32)
    meta = plane.put("p", {"input_ids": ids}, lengths=LENGTHS, chunk_sizes=(2, 2), tags={}).subset(order)
    first = plane.fetch(meta, ["input_ids"])["input_ids"]
    again = plane.fetch(meta, ["input_ids"])["input_ids"]
    bounds = np.cumsum([0, *LENGTHS])
    expected = np.concatenate([ids[bounds[p] : bounds[p + 1]] for p in order])
    np.testing.assert_array_equal(first, expected)
    np.testing.assert_array_equal(again, expected)
    assert np.shares_memory(first, again)


def test_another_order_or_fewer_samples_read_right_after_a_first_fetch() -> None:
    plane = InMemoryDataPlane()
    plane.open_partition("p", [INPUT_IDS])
    ids = np.arange(10, dtype=np.int32)
    meta = plane.put("p", {"input_ids": ids}, lengths=LENGTHS, chunk_sizes=(2, 2), tags={})
    for order in ((0, 2, 1, 3), (1,), (3, 2, 1, 0), (0, 2, 3), (1, 0), (0, 1, 2, 3)):
        got = plane.fetch(meta.subset(order), ["input_ids"])["input_ids"]
        bounds = np.cumsum([0, *LENGTHS])
        np.testing.assert_array_equal(got, np.concatenate([ids[bounds[p] : bounds[p + 1]] for p in order]))
