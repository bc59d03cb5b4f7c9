"""A storage that keeps values in the host itself, for debugging and for a data plane within one process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nemo_like.data_plane.client import Host, Loaded, Stored
from nemo_like.data_plane.segments import Segment
from nemo_like.data_plane.storage_errors import StorageFailed


class InMemoryStorage:
    """A ``host.Storage`` that is a dictionary."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, dict[str, np.ndarray]]] = {}  # storage id -> key -> column

    @property
    def num_bytes(self) -> int:
        """The bytes of the values of all partitions."""
        return sum(self.bytes_of(storage_id) for storage_id in self._values)

    @property
    def num_keys(self) -> int:
        """The number of keys that have values, over all partitions."""
        return sum(len(keys) for keys in self._values.values())

    def bytes_of(self, storage_id: str) -> int:
        """Return the bytes of one partition's values."""
        keys = self._values.get(storage_id, {}).values()
        return sum(array.nbytes for columns in keys for array in columns.values())

    async def start(self, timeout_s: float) -> None:
        """Return at once: there is no process."""

    async def death(self) -> str:
        """Wait for ever: there is no process that could die without the host."""
        await asyncio.Event().wait()
        raise AssertionError

    async def register(self, storage_id: str, keys: Sequence[str]) -> str:
        """Return the storage id, which is all that ``save`` needs to know of the keys."""
        return storage_id

    def save(self, storage_id: str, keys: Sequence[str], values: Mapping[str, Sequence[np.ndarray]]) -> None:
        """Keep a copy of the values, one array per column and key."""
        kept = self._values.setdefault(storage_id, {})
        for index, key in enumerate(keys):
            kept[key] = {name: arrays[index].copy() for name, arrays in values.items()}

    def load(self, storage_id: str, segments: Sequence[Segment]) -> list[dict[str, np.ndarray]]:
        """Return of each segment one array per column. Raises StorageFailed for a key that is not there."""
        kept = self._values.get(storage_id, {})
        absent = [segment.key for segment in segments if segment.key not in kept]
        if absent:
            raise StorageFailed(f"segments {absent} are not in storage")
        return [{name: kept[segment.key][name] for name in segment.columns} for segment in segments]

    async def clear(self, segments: Sequence[Segment]) -> None:
        """Free the values of these segments."""
        for segment in segments:
            self._values.get(segment.write, {}).pop(segment.key, None)

    async def clear_partition(self, storage_id: str) -> None:
        """Free all values of a partition."""
        self._values.pop(storage_id, None)

    async def stop(self) -> None:
        """Free all values."""
        self._values.clear()


class HostStore:
    """A ``client.Store`` that saves values in the host's process, and loads them from there."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def save(self, segments: Sequence[Segment], values: Stored, timeout_s: float) -> Any:
        """Send the values to the host, and return the storage id, with which readers load them."""
        storage_id, keys = segments[0].write, [segment.key for segment in segments]
        self._host.ask("save", storage_id, timeout_s, storage_id, keys, values)
        return storage_id

    def load(self, segments: Sequence[Segment], timeout_s: float) -> Sequence[Loaded]:
        """Return the values, which the host sends. Raises StorageFailed for a segment that is not there."""
        storage_id = segments[0].write
        loaded: list[Loaded] = self._host.ask("load", storage_id, timeout_s, storage_id, tuple(segments))
        return loaded

    def close(self) -> None:
        """Do nothing: there is no connection to close."""
