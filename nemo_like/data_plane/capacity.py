"""How many bytes the data plane may store, and how many are reserved. Standard library only.

A writer reserves before it sends, so a write that does not fit fails before any of it is stored.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from nemo_like.data_plane.storage_errors import CapacityExceeded, listed


class Capacity:
    """The bytes that each storage key has reserved, and their limit.

    It has no lock, since the host calls it on one event loop.
    """

    def __init__(self, limit_bytes: int | None) -> None:
        """Allow ``limit_bytes`` in all; None allows any number."""
        self._limit_bytes = limit_bytes
        self._reserved: dict[str, dict[str, int]] = {}  # storage id -> key -> bytes

    @property
    def used_bytes(self) -> int:
        return sum(sum(keys.values()) for keys in self._reserved.values())

    def reserve(self, partition: str, storage_id: str, sizes: Mapping[str, int]) -> None:
        """Reserve ``sizes`` (key -> bytes), or nothing and raise CapacityExceeded.

        ``partition`` is for the message.
        """
        wanted, used = sum(sizes.values()), self.used_bytes
        if self._limit_bytes is not None and used + wanted > self._limit_bytes:
            raise CapacityExceeded(
                f"partition {partition!r}: {wanted:,} more bytes do not fit, because {used:,} of "
                f"data_plane.capacity_gib={self._limit_bytes / 2**30:g} ({self._limit_bytes:,} bytes) are "
                f"taken, by {listed(self._shares()) or 'nothing'}. Raise data_plane.capacity_gib, or store "
                "fewer samples or columns at a time"
            )
        self._reserved.setdefault(storage_id, {}).update(sizes)

    def release(self, storage_id: str, keys: Iterable[str]) -> None:
        """Release what these keys have reserved; skip keys that have reserved nothing."""
        reserved = self._reserved.get(storage_id, {})
        for key in keys:
            reserved.pop(key, None)

    def release_partition(self, storage_id: str) -> None:
        self._reserved.pop(storage_id, None)

    def _shares(self) -> list[str]:
        return [f"{storage_id} ({sum(keys.values()):,})" for storage_id, keys in self._reserved.items()]
