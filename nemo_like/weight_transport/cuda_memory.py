"""Memory of a CUDA device that processes of the same node map, through CUDA's inter-process handles.

    owner                                       readers
      make a ticket for each reader ───────────▶ map the buffer
      write to the buffer                        read it where it lies
      release the buffer                         release it: the last one to do so frees the memory

A ticket is good for one reader only. PyTorch counts the tickets that are out, and keeps the memory until each
has been used and its reader has released the memory, even when the owner released it long before. A reader on
another device than the buffer's reads it over peer access (NVLink, PCIe); without it, mapping fails.

PyTorch's own tickets also have a CUDA event for the reader to wait for, which belongs to the owner's device.
A reader on another device would open the event there, so here the owner waits for its own writes instead, and
no reader opens the event.

The owner can be a sender of weights, which fills two such buffers in turn with buckets.
"""

from __future__ import annotations

import functools
import inspect
import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from nemo_like.weight_transport.bucket_stream import NUM_BUFFERS
from nemo_like.weight_transport.connections import Receivers, SenderConnection

_PARAMETERS = list(inspect.signature(rebuild_cuda_tensor).parameters)
_DEVICE_INDEX, _WAITS_INDEX = _PARAMETERS.index("storage_device"), _PARAMETERS.index("event_sync_required")


@dataclass(frozen=True, slots=True)
class Ticket:
    """What one reader needs to map the buffer."""

    device_uuid: str  # of the device with the memory; device indexes differ between processes
    arguments: tuple[Any, ...]  # of torch's rebuild_cuda_tensor

    def to_bytes(self) -> bytes:
        return pickle.dumps((self.device_uuid, self.arguments))

    @classmethod
    def from_bytes(cls, message: bytes) -> Ticket:
        """Unpickle a ticket. Only a message of this user's own sender may come here, since unpickling trusts
        it."""
        return cls(*pickle.loads(message))

    def arguments_on(self, device_index: int) -> Sequence[Any]:
        """Return the arguments with which torch rebuilds the shared CUDA tensor in a reading process, on the
        reader's device ``device_index`` and without an event to wait for."""
        arguments = list(self.arguments)
        arguments[_DEVICE_INDEX], arguments[_WAITS_INDEX] = device_index, False
        return arguments


def make_ticket(buffer: Tensor) -> bytes:
    """Return a ticket with which one more reader can map the CUDA buffer. Writes to the buffer are complete
    when this returns."""
    torch.cuda.synchronize(buffer.device)
    uuid = str(torch.cuda.get_device_properties(buffer.device).uuid)
    return Ticket(uuid, reduce_tensor(buffer)[1]).to_bytes()


def map_ticket(message: bytes, device: torch.device) -> Tensor:
    """Map the memory of a ticket and return it as [bytes] uint8.

    Raises RuntimeError when ``device`` cannot reach the memory.
    """
    ticket = Ticket.from_bytes(message)
    index = torch.cuda.current_device() if device.index is None else device.index
    try:
        return rebuild_cuda_tensor(*ticket.arguments_on(index))
    except RuntimeError as error:
        own = torch.cuda.get_device_properties(index).uuid
        raise RuntimeError(
            f"GPU {own} cannot map memory of GPU {ticket.device_uuid}; engines that share GPUs with the "
            f"trainer need peer access between them: {error}"
        ) from error


class MappedOutgoingBuckets:
    """The sender's end of buckets in two buffers, which the receivers map once, when they connect. The sender
    owns the buffers."""

    def __init__(
        self,
        buffers: Sequence[Tensor],
        make_ticket: Callable[[Tensor], bytes],
        wait_until_written: Callable[[], object],
    ) -> None:
        """Keep the buffers, each [bytes] uint8, and two functions: ``make_ticket`` makes a ticket for a
        buffer, ``wait_until_written`` waits until receivers can read what was written."""
        self._buffers, self._make_ticket = list(buffers), make_ticket
        self._wait_until_written = wait_until_written

    def hand_out(self, receivers: Receivers) -> None:
        """Send every receiver its tickets; called once, when all receivers have connected."""
        for buffer in self._buffers:
            receivers.broadcast(functools.partial(self._make_ticket, buffer))

    def buffer(self, index: int) -> Tensor:
        return self._buffers[index % NUM_BUFFERS]

    def carry(self, index: int, bucket: Tensor) -> None:
        self._wait_until_written()

    def close(self) -> None:
        """Release the buffers; their memory is free once all receivers have closed."""
        self._buffers.clear()


class MappedIncomingBuckets:
    """A receiver's end of buckets in two buffers, which it maps with the tickets that the sender hands
    out."""

    def __init__(self, sender: SenderConnection, map_ticket: Callable[[bytes], Tensor]) -> None:
        self._buffers = [map_ticket(sender.hear("ticket for a buffer")) for _ in range(NUM_BUFFERS)]

    def bucket(self, index: int, num_bytes: int) -> Tensor:
        return self._buffers[index % NUM_BUFFERS][:num_bytes]

    def close(self) -> None:
        self._buffers.clear()
