"""What was changed in Mooncake's memory is refused before any of it is decoded."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transfer_queue.utils import serial_utils

from nemo_like.data_plane.mooncake_digests import DigestingClient
from nemo_like.data_plane.storage_errors import CorruptData


class Memory:
    """A client that keeps bytes, which a test may change."""

    def __init__(self) -> None:
        self.kept: dict[str, torch.Tensor] = {}

    def put(self, keys: list[str], values: list[Any]) -> list[Any] | None:
        assert all(isinstance(value, torch.Tensor) and value.dtype is torch.uint8 for value in values)
        self.kept |= dict(zip(keys, values, strict=True))
        return None

    def get(
        self, keys: list[str], shapes: Any = None, dtypes: Any = None, custom_backend_meta: Any = None
    ) -> list[Any]:
        assert [tuple(self.kept[key].shape) for key in keys] == shapes
        return [self.kept[key] for key in keys]

    def clear(self, keys: list[str], custom_backend_meta: Any = None) -> None:
        for key in keys:
            del self.kept[key]

    def close(self) -> None:
        self.kept.clear()


VALUES = [np.arange(5), "a key", np.zeros((2, 0), np.uint8)]
KEYS = ["0@a", "0@b", "1@a"]


def test_values_come_back_as_they_were_put() -> None:
    memory = Memory()
    client = DigestingClient(memory)
    told = client.put(KEYS, VALUES)
    back = client.get(KEYS, [None] * 3, [None] * 3, told)
    assert back[1] == "a key" and back[2].shape == (2, 0)
    np.testing.assert_array_equal(back[0], VALUES[0])
    client.clear(KEYS, told)
    assert not memory.kept


class Mark:
    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (self.path,)


def test_bytes_of_a_stranger_are_not_unpickled(tmp_path: Path) -> None:
    memory, mark = Memory(), tmp_path / "mark"
    client = DigestingClient(memory)
    told = client.put(["0@a"], [Mark(str(mark))])
    pickled = memory.kept["0@a"].clone()
    memory.kept["0@a"][-1] += 1
    with pytest.raises(CorruptData, match="Mooncake returned other bytes for 0@a than the run had put there"):
        client.get(["0@a"], custom_backend_meta=told)
    assert not mark.exists()
    # TransferQueue alone would have unpickled it.
    serial_utils.batch_decode_from([pickled])
    assert mark.exists()


def test_a_value_cannot_take_the_place_of_another_of_the_run() -> None:
    memory = Memory()
    client = DigestingClient(memory)
    told = client.put(["0@a", "1@a"], [np.arange(5), np.arange(5) + 1])
    memory.kept["0@a"] = memory.kept["1@a"]
    with pytest.raises(CorruptData):
        client.get(["0@a"], custom_backend_meta=told[:1])


def test_what_the_controller_is_told_is_small_and_plain() -> None:
    (told,) = DigestingClient(Memory()).put(["0@a"], [np.zeros(1 << 20)])
    assert len(pickle.dumps(told)) < 200
