"""Bookkeeping of partitions: how many may be open, and segments that take another's place."""

from __future__ import annotations

import pytest

from nemo_like.data_plane.capacity import Capacity
from nemo_like.data_plane.columns import INPUT_IDS, PREV_LOGPROBS
from nemo_like.data_plane.errors import PartitionExists, TooManyPartitions
from nemo_like.data_plane.in_memory import InMemoryDataPlane, InMemoryStorage
from nemo_like.data_plane.registry import Registry
from nemo_like.data_plane.segments import Commit, Part, Replacement, Segment, Want
from tests.unit.data_plane.contract import in_thread

SHARED = Segment("s", ("input_ids",), (Part("a", None, 2, 4), Part("b", None, 2, 6), Part("c", None, 1, 1)))
ALL = Want(("input_ids",), (("b", None),))


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def filled() -> tuple[Registry, str, str]:
    registry = Registry("run", Capacity(1000))
    registry.open("p", [INPUT_IDS, PREV_LOGPROBS])
    storage_id = registry.describe("p").storage_id
    registry.commit("p", storage_id, Commit("me", (SHARED,), {"a": 2, "b": 2, "c": 1}))
    return registry, "p", storage_id


def test_no_more_partitions_than_allowed_are_open_and_the_error_says_since_when() -> None:
    clock = Clock()
    registry = Registry("run", Capacity(None), max_open_partitions=2, clock=clock)
    assert registry.open("train-1", [INPUT_IDS])
    clock.now_s = 20.0
    assert registry.open("train-2", [INPUT_IDS])
    clock.now_s = 25.5
    assert not registry.open("train-3", [INPUT_IDS])
    with pytest.raises(PartitionExists):
        registry.open("train-2", [INPUT_IDS])
    assert str(registry.too_many("train-3", 5.0)) == (
        "partition 'train-3' could not be opened within 5 s: data_plane.max_open_partitions=2 are open, "
        "'train-1' for 25.5 s, 'train-2' for 5.5 s. Their consumers are behind, or nobody closes them"
    )
    registry.close("train-1")
    assert registry.open("train-3", [INPUT_IDS])


def test_a_producer_waits_for_a_partition_to_close_and_not_for_ever() -> None:
    plane = InMemoryDataPlane(InMemoryStorage(max_open_partitions=1), timeout_s=0.3)
    plane.open_partition("train-1", [INPUT_IDS])
    with pytest.raises(TooManyPartitions, match="'train-1' for 0"):
        plane.open_partition("train-2", [INPUT_IDS])
    result, waiting = in_thread(lambda: plane.open_partition("train-2", [INPUT_IDS]))
    plane.close_partition("train-1")
    waiting.join(5)
    assert result == [None]


def test_a_segment_is_thinned_once_a_whole_chunk_of_it_is_cleared() -> None:
    registry, name, storage_id = filled()
    assert registry.clear(name, storage_id, (("a", (0,)),)) == ((), ())
    ((), (thinned,)) = registry.clear(name, storage_id, (("a", (1,)), ("c", None)))
    assert thinned == (SHARED, (1,))
    rest = Segment("t", ("input_ids",), (SHARED.parts[1],))
    assert registry.replace(name, storage_id, [Replacement("s", rest, 40)]) == ((SHARED,), ())
    assert registry.locate(name, storage_id, [ALL]) == [rest]
    assert registry.capacity.used_bytes == 40
    assert registry.clear(name, storage_id, (("b", None),)) == ((rest,), ())


def test_what_is_cleared_while_a_segment_is_replaced_is_thinned_next() -> None:
    registry, name, storage_id = filled()
    registry.clear(name, storage_id, (("a", None),))
    assert registry.clear(name, storage_id, (("c", None),)) == ((), ())
    stale = Segment("t", ("input_ids",), SHARED.parts[1:])
    obsolete, (again,) = registry.replace(name, storage_id, [Replacement("s", stale, 60)])
    assert obsolete == (SHARED,)
    assert again == (stale, (0,))


def test_a_segment_that_nothing_needs_any_more_once_it_is_replaced_goes_with_its_replacement() -> None:
    registry, name, storage_id = filled()
    registry.clear(name, storage_id, (("a", None),))
    assert registry.clear(name, storage_id, (("b", None), ("c", None))) == ((), ())
    rest = Segment("t", ("input_ids",), SHARED.parts[1:])
    assert registry.replace(name, storage_id, [Replacement("s", rest, 40)]) == ((SHARED, rest), ())
