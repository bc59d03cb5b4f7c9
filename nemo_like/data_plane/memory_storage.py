"""Values in the host itself: for debugging, and for a data plane within one process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from nemo_like.data_plane.client import Host, Stored
from nemo_like.data_plane.segments import Segment
from nemo_like.data_plane.storage_errors import StorageFailed


class InMemoryStorage:
    """``host.Storage`` in a dictionary."""

    def __init__(self) -> None:
        self._values: dict[str, dict[str, dict[str, np.ndarray]]] = {}  # storage id -> key -> column

    @property
    def num_bytes(self) -> int:
        """Bytes held in all partitions."""
        return sum(self.bytes_of(storage_id) for storage_id in self._values)

    @property
    def num_keys(self) -> int:
        """Keys with values, over all partitions."""
        return sum(len(keys) for keys in self._values.values())

    def bytes_of(self, storage_id: str) -> int:
        """Bytes held in one partition."""
        keys = self._values.get(storage_id, {}).values()
        return sum(array.nbytes for columns in keys for array in columns.values())

    async def start(self, timeout_s: float) -> None:
        """Return at once: there is no process."""

    async def death(self) -> str:
        """Wait for ever: the values end with the host."""
        await asyncio.Event().wait()
        raise AssertionError

    async def register(self, storage_id: str, keys: Sequence[str]) -> str:
        """Return the storage id, under which the keys will be."""
        return storage_id

    def save(self, storage_id: str, keys: Sequence[str], values: Mapping[str, Sequence[np.ndarray]]) -> None:
        """Keep a copy of the values, one array per column and key."""
        kept = self._values.setdefault(storage_id, {})
        for index, key in enumerate(keys):
            kept[key] = {name: arrays[index].copy() for name, arrays in values.items()}

    def load(
        self, storage_id: str, keys: Sequence[str], columns: Sequence[str]
    ) -> dict[str, list[np.ndarray]]:
        """Return one array per column and key. Raises StorageFailed for a key that is not there."""
        kept = self._values.get(storage_id, {})
        absent = [key for key in keys if key not in kept]
        if absent:
            raise StorageFailed(f"segments {absent} are not in storage")
        return {name: [kept[key][name] for key in keys] for name in columns}

    async def clear(self, segments: Sequence[Segment]) -> None:
        """Forget these segments' values."""
        for segment in segments:
            self._values.get(segment.write, {}).pop(segment.key, None)

    async def clear_partition(self, storage_id: str) -> None:
        """Forget all values of a partition."""
        self._values.pop(storage_id, None)

    async def stop(self) -> None:
        """Forget everything."""
        self._values.clear()


class HostStore:
    """``client.Store`` of values that the host itself keeps."""

    def __init__(self, host: Host) -> None:
        self._host = host

    def save(self, segments: Sequence[Segment], values: Stored, timeout_s: float) -> Any:
        """Send the values to the host."""
        storage_id, keys = segments[0].write, [segment.key for segment in segments]
        self._host.ask("save", storage_id, timeout_s, storage_id, keys, values)
        return storage_id

    def load(self, segments: Sequence[Segment], columns: Sequence[str], timeout_s: float) -> Stored:
        """Get the values from the host."""
        storage_id, keys = segments[0].write, [segment.key for segment in segments]
        loaded: Mapping[str, list[Any]] = self._host.ask(
            "load", storage_id, timeout_s, storage_id, keys, tuple(columns)
        )
        return loaded

    def close(self) -> None:
        """Nothing to disconnect."""
