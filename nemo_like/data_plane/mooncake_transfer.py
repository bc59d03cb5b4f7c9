"""Values between this process's arrays and Mooncake's memory, with no copy and no encoding in between.

A value is an object named as TransferQueue names it, ``index@column``, since it frees them by these names.
Its dtype and shape travel in the address, so that an object is nothing but the array's bytes.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from nemo_like.data_plane.client import Stored
from nemo_like.data_plane.errors import CapacityExceeded
from nemo_like.data_plane.exchange import GaveUp

# Mooncake's code for "no segment has room".
_IS_FULL = -200
_FULL_MESSAGE = (
    "Mooncake's storage units have no room for the write, of which nothing was kept. Raise "
    "data_plane.mooncake_cfg.segment_gib or data_plane.num_storage_units, or store fewer samples or columns "
    "at a time"
)
# Of the arrays that are read together.
_ALIGN = 64


class MooncakeMemory:
    """Objects by key; calls block. Safe to use from several threads."""

    def __init__(self, client: Any) -> None:
        """``client`` is TransferQueue's."""
        self._store, self._placement = client._store, client.replica_config
        # Two threads may write the same array, which is not registered twice.
        self._writing = threading.Lock()

    def write(self, keys: Sequence[str], arrays: Sequence[np.ndarray]) -> None:
        """Store contiguous arrays that are not empty. Raises CapacityExceeded."""
        places = [array.ctypes.data for array in arrays]
        sizes = [array.nbytes for array in arrays]
        with self._writing, self._registered(merged(zip(places, sizes, strict=True))):
            codes = self._store.batch_upsert_from(list(keys), places, sizes, config=self._placement)
        if _IS_FULL in codes:
            raise CapacityExceeded(_FULL_MESSAGE)
        self._check("put", keys, codes, [0] * len(keys))

    def read(self, keys: Sequence[str], sizes: Sequence[int]) -> list[np.ndarray]:
        """The objects, whose sizes are known and not 0, as [size] uint8."""
        ends = np.cumsum([-(-size // _ALIGN) * _ALIGN for size in sizes])
        starts = [0, *ends[:-1].tolist()]
        memory = np.empty(int(ends[-1]), np.uint8)
        address = memory.ctypes.data
        with self._registered([(address, memory.nbytes)]):
            codes = self._store.batch_get_into(list(keys), [address + start for start in starts], list(sizes))
        self._check("get", keys, codes, sizes)
        return [memory[start : start + size] for start, size in zip(starts, sizes, strict=True)]

    @contextmanager
    def _registered(self, regions: Iterable[tuple[int, int]]) -> Iterator[None]:
        """(address, bytes) that Mooncake may read from and write to within the block."""
        registered = []
        try:
            for address, num_bytes in regions:
                code = self._store.register_buffer(address, num_bytes)
                if code != 0:
                    raise RuntimeError(
                        f"Mooncake does not take a buffer of {num_bytes} bytes (its error {code})"
                    )
                registered.append(address)
            yield
        finally:
            for address in registered:
                self._store.unregister_buffer(address)

    @staticmethod
    def _check(doing: str, keys: Sequence[str], codes: Sequence[int], expected: Sequence[int]) -> None:
        """Mooncake answers a code for each key; a get's is the number of bytes that the object had."""
        if len(codes) != len(keys):
            raise RuntimeError(f"Mooncake answered {len(codes)} of {len(keys)} keys")
        for key, code, right in zip(keys, codes, expected, strict=True):
            if code != right:
                raise RuntimeError(f"a {doing} of {key} ended with {code} instead of {right}")


def merged(regions: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(address, bytes) in ascending order, with what overlaps or touches as one: Mooncake takes no memory
    twice, and arrays may be views of one another."""
    whole: list[tuple[int, int]] = []
    for address, num_bytes in sorted(regions):
        if whole and address <= sum(whole[-1]):
            start, end = whole[-1][0], max(sum(whole[-1]), address + num_bytes)
            whole[-1] = (start, end - start)
        else:
            whole.append((address, num_bytes))
    return whole


class MooncakeTransfer:
    """Mooncake's calls block, so they run on threads of the session's loop."""

    def __init__(
        self,
        memory: MooncakeMemory,
        loop: asyncio.AbstractEventLoop,
        failure: concurrent.futures.Future[str],
    ) -> None:
        """Waits end when ``failure`` is done."""
        self._memory, self._loop, self._failure = memory, loop, failure

    def save(self, indexes: Sequence[int], values: Stored, timeout_s: float) -> list[dict[str, Any]]:
        """Dtype and shape of each value, by column."""
        arrays = {
            f"{index}@{name}": np.ascontiguousarray(array)
            for name, of_column in values.items()
            for index, array in zip(indexes, of_column, strict=True)
            if array.size  # Mooncake has no empty objects.
        }
        if arrays:
            self._run(timeout_s, self._memory.write, list(arrays), list(arrays.values()))
        return [
            {name: (of_column[place].dtype.str, of_column[place].shape) for name, of_column in values.items()}
            for place in range(len(indexes))
        ]

    def load(
        self, addresses: Sequence[tuple[int, Mapping[str, Any]]], columns: Sequence[str], timeout_s: float
    ) -> dict[str, list[np.ndarray]]:
        described = {
            f"{index}@{name}": (np.dtype(of_columns[name][0]), of_columns[name][1])
            for name in columns
            for index, of_columns in addresses
        }
        sizes = {key: dtype.itemsize * math.prod(shape) for key, (dtype, shape) in described.items()}
        keys = [key for key, size in sizes.items() if size]
        read = self._run(timeout_s, self._memory.read, keys, [sizes[key] for key in keys]) if keys else []
        found = dict(zip(keys, read, strict=True))
        arrays = (
            found[key].view(dtype).reshape(shape) if key in found else np.empty(shape, dtype)
            for key, (dtype, shape) in described.items()
        )
        return {name: list(itertools.islice(arrays, len(addresses))) for name in columns}

    def _run(self, timeout_s: float, call: Callable[..., Any], *args: Any) -> Any:
        running = asyncio.run_coroutine_threadsafe(asyncio.to_thread(call, *args), self._loop)
        concurrent.futures.wait(
            [running, self._failure], timeout=timeout_s, return_when=concurrent.futures.FIRST_COMPLETED
        )
        if not running.done():
            running.cancel()
            raise GaveUp
        return running.result()
