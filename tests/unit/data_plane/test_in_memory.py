"""The contract of data planes, within one process."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from nemo_like.batch.columns import ROLLOUT_COLUMNS, Column
from nemo_like.data_plane.in_memory import InMemoryDataPlane, LocalHost
from tests.unit.data_plane.contract import DataPlaneContract


class InMemoryPlanes:
    timeout_s = 0.5
    capacity_bytes = 12 << 20

    def __init__(self) -> None:
        host = LocalHost(capacity_bytes=self.capacity_bytes, timeout_s=self.timeout_s)
        self.first = InMemoryDataPlane(host, timeout_s=self.timeout_s)
        self.second = InMemoryDataPlane(host, timeout_s=self.timeout_s)

    def client(self) -> InMemoryDataPlane:
        return self.first

    def other_client(self) -> InMemoryDataPlane:
        return self.second

    def open(self, name: str, columns: Sequence[Column]) -> None:
        self.first.open_partition(name, columns)

    def close(self, name: str) -> None:
        self.first.close_partition(name)

    def num_stored_keys(self) -> int:
        self.first.host.ask("settled", "", self.timeout_s)
        return self.first.host.storage.num_keys

    def num_stored_bytes(self, partition: str) -> int:
        self.first.host.ask("settled", partition, self.timeout_s)
        info = self.first.host.ask("describe", partition, self.timeout_s, partition)
        return self.first.host.storage.bytes_of(info.storage_id)


@pytest.fixture(scope="module")
def planes() -> InMemoryPlanes:
    return InMemoryPlanes()


class TestInMemory(DataPlaneContract):
    pass


def test_the_storage_counts_the_bytes_of_its_values() -> None:
    plane = InMemoryDataPlane()
    plane.open_partition("p", ROLLOUT_COLUMNS)
    columns = {"input_ids": np.zeros(5, np.int32), "response_mask": np.zeros(5, np.uint8)}
    meta = plane.put("p", columns, lengths=(2, 3), chunk_sizes=(2,), tags={})
    assert plane.host.storage.num_bytes == 5 * 4 + 5
    plane.clear(meta)
    plane.host.ask("settled", "p", 5.0)
    assert plane.host.storage.num_bytes == 0


def test_a_client_that_only_puts_keeps_nothing_of_partitions_that_are_closed() -> None:
    plane = InMemoryDataPlane()
    for step in range(20):
        name = f"train-{step}"
        plane.open_partition(name, ROLLOUT_COLUMNS)
        plane.put(name, {"input_ids": np.zeros(3, np.int32)}, lengths=(3,), chunk_sizes=(1,), tags={})
        plane.close_partition(name)
    assert list(plane._infos) == ["train-19"]
