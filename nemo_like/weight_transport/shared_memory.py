"""Memory that one process writes tensors to and others of the same node read, since all of them map it.

    sender                                   receivers
      listen on a socket in the file system ◀── connect
      send the memory's file descriptor ──────▶ map the memory
      write everything, then announce it ─────▶ read it where it lies: nothing is copied

The memory has no name and no file: it is gone with the last process that maps it, however that process ends.
Memory of a CUDA device is mapped anew for each version instead, with a ticket that its announcement contains.
"""

from __future__ import annotations

import mmap
import os
import shutil
import socket
import struct
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import repeat
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from nemo_like.weight_transport.buckets import ALIGNMENT_BYTES, Bucket, TensorSpec, plan_buckets
from nemo_like.weight_transport.cuda_memory import CudaMemory, map_ticket
from nemo_like.weight_transport.packing import check_exhausted, pack, view

# An announcement: (number of the transfer, version, whether all of it was written); a ticket may follow.
_ANNOUNCEMENT = struct.Struct("<qq?")
_MAX_MESSAGE_BYTES = 1 << 16
_HOST = torch.device("cpu")


class MemoryKind(Enum):
    """Where the tensors lie."""

    host = "host"
    cuda = "cuda"  # on the sender's device


@dataclass(frozen=True, slots=True)
class Transfer:
    """One attempt to bring a version to the receivers; ``number`` counts the attempts.

    All senders count alike. A version that is tried again is another transfer, so that no receiver takes
    what a failed transfer left for the new one.
    """

    number: int
    version: int


@dataclass(frozen=True, slots=True)
class MemoryAddress:
    """Where receivers connect to one sender."""

    name: str
    path: str  # of the socket, in a directory that only this user may enter
    timeout_s: float  # deadline for connecting, and for each announcement
    kind: MemoryKind = MemoryKind.host


class Memory(Protocol):
    """The sender's side of memory that others map."""

    def begin(self) -> Tensor:
        """Return the buffer for the next version, [bytes] uint8, to write to."""

    def ticket(self) -> bytes:
        """Return what one receiver needs to map this version, beside what it got when it connected."""

    def release(self) -> None:
        """Give up this version's buffer: nothing more is written to it."""


class HostMemory:
    """Host memory that is mapped once and written for every version.

    Raises OSError when the memory cannot be had.
    """

    def __init__(self, name: str, bucket: Bucket) -> None:
        self.descriptor = os.memfd_create(f"nemo_like-{name}", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, _mapped_bytes(bucket))
        self._mapped = _map(self.descriptor, bucket)

    def begin(self) -> Tensor:
        return self._mapped

    def ticket(self) -> bytes:
        return b""

    def release(self) -> None:
        """Do nothing: the memory stays for the next version."""

    def close(self) -> None:
        """Close the file descriptor. Safe to call twice."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class MemorySender:
    """Offers version after version of the same tensors, in memory of the host or of a CUDA ``device``.

    Raises OSError when the memory cannot be had.
    """

    def __init__(
        self,
        name: str,
        tensors: Sequence[TensorSpec],
        num_receivers: int,
        timeout_s: float,
        device: torch.device = _HOST,
    ) -> None:
        kind = MemoryKind.host if device.type == "cpu" else MemoryKind.cuda
        self.address = MemoryAddress(name, str(_private_directory() / "socket"), timeout_s, kind)
        self._num_receivers = num_receivers
        self._bucket = _whole(tensors)
        self._host = HostMemory(name, self._bucket) if kind is MemoryKind.host else None
        self._memory: Memory = self._host or CudaMemory(_mapped_bytes(self._bucket), device)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(self.address.path)
        self._listener.listen(num_receivers)
        self._receivers: list[socket.socket] = []

    def open(self) -> None:
        """Wait until every receiver has connected. Raises a TimeoutError that says how many are missing."""
        deadline = time.monotonic() + self.address.timeout_s
        try:
            while len(self._receivers) < self._num_receivers:
                self._listener.settimeout(max(1e-3, deadline - time.monotonic()))
                receiver, _ = self._listener.accept()
                self._receivers.append(receiver)
                if self._host is not None:
                    socket.send_fds(receiver, [b"memory"], [self._host.descriptor])
        except TimeoutError:
            missing = self._num_receivers - len(self._receivers)
            raise TimeoutError(
                f"{self.address.name!r}: {missing} of {self._num_receivers} receivers did not connect within "
                f"{self.address.timeout_s:g} s"
            ) from None
        finally:
            self._stop_listening()

    def offer(self, transfer: Transfer, values: Iterable[tuple[str, Tensor]]) -> int:
        """Write the values, announce them to every receiver, and return the number of bytes.

        No receiver may still be reading the transfer before. Raises ValueError when the values are not the
        tensors in their order: a name, dtype or shape differs. The receivers are then told that this transfer
        failed.
        """
        tickets = None
        try:
            stream = iter(values)
            pack(self._bucket, stream, self._memory.begin())
            check_exhausted(stream)
            tickets = [self._memory.ticket() for _ in self._receivers]
        finally:
            announcement = _ANNOUNCEMENT.pack(transfer.number, transfer.version, tickets is not None)
            for receiver, ticket in zip(self._receivers, tickets or repeat(b""), strict=False):
                receiver.send(announcement + ticket)
            self._memory.release()
        return self._bucket.num_bytes

    def release(self) -> None:
        """Give up the latest transfer's memory. To be called when every receiver has read it."""
        self._memory.release()

    def close(self) -> None:
        """Close the connections: a receiver that waits fails at once. Safe to call twice."""
        self._stop_listening()
        for receiver in self._receivers:
            receiver.close()
        self._receivers.clear()
        if self._host is not None:
            self._host.close()

    def _stop_listening(self) -> None:
        self._listener.close()
        shutil.rmtree(Path(self.address.path).parent, ignore_errors=True)


class MemoryReceiver:
    """Reads what a ``MemorySender`` offers; memory of a CUDA device is mapped on ``device``.

    Raises OSError (TimeoutError is one) when the sender cannot be reached.
    """

    def __init__(
        self, address: MemoryAddress, tensors: Sequence[TensorSpec], device: torch.device = _HOST
    ) -> None:
        self._address, self._device = address, device
        self._bucket = _whole(tensors)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(address.timeout_s)
        self._socket.connect(address.path)
        self._memory: Tensor | None = None
        if address.kind is MemoryKind.host:
            _, [descriptor], _, _ = socket.recv_fds(self._socket, 16, maxfds=1)
            self._memory = _map(descriptor, self._bucket)
            os.close(descriptor)

    def fetch(self, transfer: Transfer) -> None:
        """Wait until this transfer is announced, and map its memory.

        Raises RuntimeError when the sender announces another version, could not write this one, or is gone,
        and TimeoutError when it announces nothing in time.
        """
        name, version = self._address.name, transfer.version
        number = -1
        while number < transfer.number:  # skip announcements that earlier transfers left
            number, announced, is_whole, ticket = self._announcement(version)
            # Also for a skipped one: the sender's memory is free only once all tickets for it were used.
            if ticket:
                self._memory = map_ticket(ticket, self._device)
        if (number, announced) != (transfer.number, version):
            raise RuntimeError(
                f"{name!r} sent version {announced} in transfer {number}, but version {version} in transfer "
                f"{transfer.number} was asked for"
            )
        if not is_whole:
            raise RuntimeError(f"{name!r} could not send version {version}")

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, view of the memory); views are valid until ``release`` or the sender's next offer."""
        if self._memory is None:
            raise RuntimeError(f"{self._address.name!r} sent nothing yet, or what it sent was let go of")
        for slot in self._bucket.slots:
            yield slot.spec.name, view(self._memory, slot)

    def release(self) -> None:
        """Give up memory of a CUDA device, so that the sender can free it; nothing more is read of it."""
        if self._address.kind is MemoryKind.cuda:
            self._memory = None

    def close(self) -> None:
        """Release the memory and close the connection. Safe to call twice."""
        self.release()
        self._socket.close()

    def _announcement(self, version: int) -> tuple[int, int, bool, bytes]:
        """Wait for the next announcement and return its (number, version, whole, ticket).

        ``version`` is the one that the caller waits for, and appears in errors only.
        """
        name, timeout_s = self._address.name, self._address.timeout_s
        try:
            message = self._socket.recv(_MAX_MESSAGE_BYTES)
        except TimeoutError:
            raise TimeoutError(f"{name!r} announced no version {version} within {timeout_s:g} s") from None
        if not message:
            raise RuntimeError(f"{name!r} went away while version {version} was waited for")
        number, announced, is_whole = _ANNOUNCEMENT.unpack_from(message)
        return number, announced, is_whole, message[_ANNOUNCEMENT.size :]


def _private_directory() -> Path:
    return Path(tempfile.mkdtemp(prefix="nemo_like-"))


def _whole(tensors: Sequence[TensorSpec]) -> Bucket:
    """Return one bucket with all tensors, since memory that is mapped already costs nothing to keep."""
    num_bytes = 1 + sum(spec.num_bytes + ALIGNMENT_BYTES for spec in tensors)
    [bucket] = plan_buckets(tensors, num_bytes) or [Bucket((), 0)]
    return bucket


def _mapped_bytes(bucket: Bucket) -> int:
    return max(bucket.num_bytes, 1)  # zero bytes cannot be mapped


def _map(descriptor: int, bucket: Bucket) -> Tensor:
    """Map the memory and return it as [bytes of the bucket] uint8; it stays mapped while the tensor lives."""
    mapped = mmap.mmap(descriptor, _mapped_bytes(bucket))
    return torch.frombuffer(mapped, dtype=torch.uint8)
