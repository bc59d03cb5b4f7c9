"""Checks that what Mooncake returns is what the run put there.

Mooncake knows no secret: whoever reaches its processes can write into their memory. TransferQueue
stores arrays there in a form that contains pickles, and objects as pickles. So each value gets a digest,
which TransferQueue's controller keeps with the value's description. A reader gets the digest from the
controller, which asks for the run's secret, and decodes no value that has another digest.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from transfer_queue.utils import serial_utils

from nemo_like.data_plane.storage_errors import CorruptData

_SIZE, _DIGEST = "packed_size", "digest"
# Hashing leaves Python's lock to others.
_NUM_THREADS = 4


class KeyValueClient(Protocol):
    """The methods of a Mooncake client that TransferQueue's storage manager calls."""

    def put(self, keys: list[str], values: list[Any]) -> list[Any] | None: ...

    def get(
        self,
        keys: list[str],
        shapes: list[Any] | None = None,
        dtypes: list[Any] | None = None,
        custom_backend_meta: list[Any] | None = None,
    ) -> list[Any]: ...

    def clear(self, keys: list[str], custom_backend_meta: list[Any] | None = None) -> None: ...

    def close(self) -> None: ...


class DigestingClient:
    """Stores values through another client as plain bytes, and accepts only the bytes that it stored.

    It has the methods of TransferQueue's ``StorageKVClient``.
    """

    def __init__(self, client: KeyValueClient) -> None:
        self._client = client

    def put(self, keys: list[str], values: list[Any]) -> list[Any]:
        """Store values; return for each what a ``get`` needs of it: its size and digest."""
        buffers, sizes = serial_utils.batch_encode_into(values, _buffers)
        digests = _digests(buffers)
        self._client.put(keys, buffers)
        return [{_SIZE: size, _DIGEST: digest} for size, digest in zip(sizes, digests, strict=True)]

    def get(
        self,
        keys: list[str],
        shapes: list[Any] | None = None,
        dtypes: list[Any] | None = None,
        custom_backend_meta: list[Any] | None = None,
    ) -> list[Any]:
        """Return the values of ``keys``; ``custom_backend_meta`` is what ``put`` returned for them. Raises
        CorruptData where the wrapped client returns other bytes than were put."""
        assert custom_backend_meta is not None
        sizes = [(meta[_SIZE],) for meta in custom_backend_meta]
        buffers = self._client.get(keys, sizes, [torch.uint8] * len(keys), [None] * len(keys))
        for key, meta, digest in zip(keys, custom_backend_meta, _digests(buffers), strict=True):
            if not secrets.compare_digest(meta[_DIGEST], digest):
                raise CorruptData(
                    f"Mooncake returned other bytes for {key} than the run had put there. Let nobody else "
                    "reach the ports of its processes"
                )
        return serial_utils.batch_decode_from(buffers)

    def clear(self, keys: list[str], custom_backend_meta: list[Any] | None = None) -> None:
        self._client.clear(keys)

    def close(self) -> None:
        self._client.close()


def _buffers(sizes: Sequence[int]) -> list[torch.Tensor]:
    return [torch.empty(size, dtype=torch.uint8) for size in sizes]


def _digests(buffers: Sequence[torch.Tensor]) -> list[str]:
    with ThreadPoolExecutor(_NUM_THREADS) as threads:
        return list(threads.map(_digest, buffers))


def _digest(buffer: torch.Tensor) -> str:
    return hashlib.sha256(buffer.numpy().data).hexdigest()
