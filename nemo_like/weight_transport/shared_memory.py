"""Host memory that a sender writes tensors to; receivers on the same node map it and read the tensors there.

    sender                                   receivers
      send the memory's file descriptor ──────▶ map the memory
      write everything, then announce it ─────▶ read it where it lies: nothing is copied

The memory has no name and no file: it is freed when the last process that maps it ends, for whatever reason.
"""

from __future__ import annotations

import json
import mmap
import os
import socket
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from nemo_like.weight_transport.buckets import ALIGNMENT_BYTES, Piece, TensorSpec, from_lists, to_lists
from nemo_like.weight_transport.connections import Endpoint, Receivers, SenderConnection, Transfer
from nemo_like.weight_transport.packing import NamedTensors, pack, view

_GREETING = b"memory"
# The memory begins with a table of what lies in it; beside the tensor's name an entry has at most this.
_MAX_ENTRY_BYTES = 256


class MemorySender:
    """Offers one transfer after the other in memory that has room for ``tensors``, or for their changes."""

    def __init__(self, receivers: Receivers, tensors: Sequence[TensorSpec]) -> None:
        """Wait until all receivers have connected, and give them the memory.

        Raises OSError when the memory cannot be allocated, TimeoutError when receivers are missing.
        """
        self._receivers = receivers
        # The changes of a tensor are smaller than the tensor, but they are two tensors.
        self._table_bytes = sum(2 * (len(json.dumps(spec.name)) + _MAX_ENTRY_BYTES) for spec in tensors)
        self._table_bytes += -self._table_bytes % ALIGNMENT_BYTES
        num_bytes = ALIGNMENT_BYTES + sum(spec.num_bytes + 2 * ALIGNMENT_BYTES for spec in tensors)
        num_bytes += self._table_bytes
        descriptor = os.memfd_create(f"nemo_like-{receivers.endpoint.name}", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, num_bytes)
            self._memory = _map(descriptor)
            receivers.open(lambda receiver: socket.send_fds(receiver, [_GREETING], [descriptor]))
        finally:
            os.close(descriptor)

    def offer(self, transfer: Transfer, values: NamedTensors) -> int:
        """Write the values, announce them to every receiver, and return their number of bytes.

        No receiver may still be reading the previous transfer. When ``values`` raises an error, the receivers
        are told that this transfer failed.
        """
        table = b""
        try:
            # There is room for everything, so that there is one buffer at most.
            packed = pack(values, lambda _: self._memory[self._table_bytes :])
            pieces = [piece for found, _ in packed for piece in found]
            table = json.dumps(to_lists(pieces)).encode()
            self._memory[: len(table)] = torch.frombuffer(bytearray(table), dtype=torch.uint8)
        finally:
            # The table is not sent: receivers listen only when this has returned, and it may be long.
            announcement = [transfer.number, transfer.version, self._table_bytes, len(table)]
            self._receivers.broadcast(json.dumps(announcement).encode())
        return sum(piece.num_bytes for piece in pieces)

    def close(self) -> None:
        """Close the connections: a receiver that waits fails at once. Safe to call twice."""
        self._receivers.close()


class MemoryReceiver:
    """Reads what a ``MemorySender`` offers. The constructor raises OSError when the sender cannot be
    reached."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._memory = self._values = torch.empty(0, dtype=torch.uint8)
        self.sender = SenderConnection(endpoint, self._map_greeting)
        self._pieces: list[Piece] = []

    def fetch(self, transfer: Transfer) -> None:
        """Wait until this transfer is announced.

        Raises RuntimeError when the sender announces another version, could not write this one, or is gone,
        and TimeoutError when it announces nothing in time.
        """
        name, version = self.sender.endpoint.name, transfer.version
        number = -1
        while number < transfer.number:  # skip announcements that earlier transfers left
            message = self.sender.hear(f"version {version}")
            number, announced, start, table_bytes = json.loads(message)
        if (number, announced) != (transfer.number, version):
            raise RuntimeError(
                f"{name!r} sent version {announced} in transfer {number}, but version {version} in transfer "
                f"{transfer.number} was asked for"
            )
        if not table_bytes:
            raise RuntimeError(f"{name!r} could not send version {version}")
        self._pieces = from_lists(json.loads(bytes(self._memory[:table_bytes].numpy())))
        self._values = self._memory[start:]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, view of the memory); views are valid until the sender's next offer."""
        for piece in self._pieces:
            yield piece.spec.name, view(self._values, piece)

    def close(self) -> None:
        """Close the connection. Safe to call twice."""
        self.sender.close()

    def _map_greeting(self, sender: socket.socket) -> None:
        """Map the memory whose file descriptor the sender sends first."""
        _, [descriptor], _, _ = socket.recv_fds(sender, len(_GREETING), maxfds=1)
        try:
            self._memory = _map(descriptor)
        finally:
            os.close(descriptor)


def _map(descriptor: int) -> Tensor:
    """Map the memory and return it as [bytes] uint8; it stays mapped while the tensor lives."""
    return torch.frombuffer(mmap.mmap(descriptor, os.fstat(descriptor).st_size), dtype=torch.uint8)
