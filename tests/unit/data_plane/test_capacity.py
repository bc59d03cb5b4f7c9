"""Bytes reserved before they are stored."""

from __future__ import annotations

import pytest

from nemo_like.data_plane.capacity import Capacity
from nemo_like.data_plane.storage_errors import CapacityExceeded


def test_a_write_fits_to_the_last_byte_and_one_more_is_refused_whole() -> None:
    capacity = Capacity(100)
    capacity.reserve("train-1", "run/train-1/1", {"a": 60, "b": 40})
    with pytest.raises(CapacityExceeded, match="1 more bytes do not fit, because 100 of"):
        capacity.reserve("train-1", "run/train-1/1", {"c": 1})
    capacity.release("run/train-1/1", ["b"])
    with pytest.raises(CapacityExceeded):
        capacity.reserve("train-1", "run/train-1/1", {"c": 20, "d": 21})
    assert capacity.used_bytes == 60
    capacity.reserve("train-1", "run/train-1/1", {"c": 20, "d": 20})


def test_the_error_says_who_takes_the_room_and_which_key_to_raise() -> None:
    capacity = Capacity(2 << 30)
    capacity.reserve("train-1", "run/train-1/1", {"a": 1 << 30})
    capacity.reserve("val-1", "run/val-1/2", {"a": 1 << 29, "b": 5})
    with pytest.raises(CapacityExceeded) as raised:
        capacity.reserve("train-2", "run/train-2/3", {"a": 1 << 30})
    assert str(raised.value) == (
        "partition 'train-2': 1,073,741,824 more bytes do not fit, because 1,610,612,741 of "
        "data_plane.capacity_gib=2 (2,147,483,648 bytes) are taken, by run/train-1/1 (1,073,741,824), "
        "run/val-1/2 (536,870,917). Raise data_plane.capacity_gib, or store fewer samples or columns at a "
        "time"
    )


def test_a_closed_partition_gives_everything_back() -> None:
    capacity = Capacity(10)
    capacity.reserve("p", "p/1", {"a": 4, "b": 6})
    capacity.release_partition("p/1")
    capacity.release_partition("p/1")
    capacity.release("p/1", ["a"])
    assert capacity.used_bytes == 0
    capacity.reserve("p", "p/2", {"a": 10})


def test_without_a_limit_nothing_is_refused() -> None:
    capacity = Capacity(None)
    capacity.reserve("p", "p/1", {"a": 1 << 60})
    assert capacity.used_bytes == 1 << 60
