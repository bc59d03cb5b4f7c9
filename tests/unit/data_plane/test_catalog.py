"""Bookkeeping of partitions: how many may be open, and which segments are still needed."""

from __future__ import annotations

import pytest

from nemo_like.batch.columns import INPUT_IDS, PREV_LOGPROBS
from nemo_like.data_plane.capacity import Capacity
from nemo_like.data_plane.catalog import Catalog
from nemo_like.data_plane.in_memory import InMemoryDataPlane, LocalHost
from nemo_like.data_plane.segments import Commit, Segment, SegmentPiece, Want
from nemo_like.data_plane.storage_errors import PartitionExists, TooManyPartitions
from tests.unit.data_plane.contract import in_thread

SHARED = Segment(
    "s",
    ("input_ids",),
    (SegmentPiece("a", None, 2, 4), SegmentPiece("b", None, 2, 6), SegmentPiece("c", None, 1, 1)),
)
REST = Want(("input_ids",), (("b", (1,)),))


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def filled() -> tuple[Catalog, str, str]:
    catalog = Catalog("run", Capacity(1000))
    catalog.open("p", [INPUT_IDS, PREV_LOGPROBS])
    storage_id = catalog.describe("p").storage_id
    catalog.commit("p", storage_id, Commit("me", (SHARED,), {"a": 2, "b": 2, "c": 1}))
    return catalog, "p", storage_id


def test_no_more_partitions_than_allowed_are_open_and_the_error_says_since_when() -> None:
    clock = Clock()
    catalog = Catalog("run", Capacity(None), max_open_partitions=2, clock=clock)
    assert catalog.open("train-1", [INPUT_IDS])
    clock.now_s = 20.0
    assert catalog.open("train-2", [INPUT_IDS])
    clock.now_s = 25.5
    assert not catalog.open("train-3", [INPUT_IDS])
    with pytest.raises(PartitionExists):
        catalog.open("train-2", [INPUT_IDS])
    assert str(catalog.too_many("train-3", 5.0)) == (
        "partition 'train-3' could not be opened within 5 s: data_plane.max_open_partitions=2 are open, "
        "'train-1' for 25.5 s, 'train-2' for 5.5 s. Their consumers are behind, or nobody closes them"
    )
    catalog.close("train-1")
    assert catalog.open("train-3", [INPUT_IDS])


def test_a_producer_waits_for_a_partition_to_close_and_not_for_ever() -> None:
    plane = InMemoryDataPlane(LocalHost(max_open_partitions=1, timeout_s=0.3), timeout_s=0.3)
    plane.open_partition("train-1", [INPUT_IDS])
    with pytest.raises(TooManyPartitions, match="'train-1' for 0"):
        plane.open_partition("train-2", [INPUT_IDS])
    result, waiting = in_thread(lambda: plane.open_partition("train-2", [INPUT_IDS]))
    plane.close_partition("train-1")
    waiting.join(5)
    assert result == [None]


def test_a_segment_is_freed_once_nothing_of_it_is_left() -> None:
    catalog, name, storage_id = filled()
    assert catalog.clear(name, storage_id, (("a", None), ("c", None), ("b", (0,)))) == []
    assert catalog.locate(name, storage_id, [REST]) == [SHARED]
    assert catalog.clear(name, storage_id, (("b", (1,)),)) == [SHARED]
