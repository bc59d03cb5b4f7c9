"""The receiving ends of the channels through which an engine's worker gets new weights."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Protocol

import torch

from nemo_like.generation.interface import WeightGroup
from nemo_like.generation.options import WeightTransport
from nemo_like.weight_transport.bucket_stream import BucketReceiver, IncomingBuckets
from nemo_like.weight_transport.connections import SenderConnection, Transfer, Word
from nemo_like.weight_transport.cuda_memory import MappedIncomingBuckets, map_ticket
from nemo_like.weight_transport.process_groups import BroadcastIncomingBuckets, NamedProcessGroup
from nemo_like.weight_transport.shared_memory import MemoryReceiver

NamedTensors = list[tuple[str, torch.Tensor]]


class IncomingWeights(Protocol):
    """The receiving end of one weight group."""

    def fetch(self, transfer: Transfer) -> None:
        """Wait for the tensors that the sender offers before the load."""

    def receive(self) -> Iterator[NamedTensors]:
        """Yield the tensors of the fetched transfer, some at a time."""

    def end(self, transfer: Transfer, how: Word) -> None:
        """Tell the sender that the transfer is loaded, or given up."""

    def close(self) -> None:
        """Close the connections: a sender that waits for this side fails at once. Safe to call twice."""


class WholeInMemory:
    """Receives transfers by shared memory: a whole transfer is there before it is loaded from there."""

    def __init__(self, receiver: MemoryReceiver) -> None:
        self._receiver = receiver
        self.fetch, self.close = receiver.fetch, receiver.close

    def receive(self) -> Iterator[NamedTensors]:
        yield list(self._receiver.tensors())

    def end(self, transfer: Transfer, how: Word) -> None:
        self._receiver.sender.say(how, transfer.number)


class InBuckets:
    """Receives transfers in buckets, which arrive during the load."""

    def __init__(self, sender: SenderConnection, buckets: IncomingBuckets, device: torch.device) -> None:
        self._sender, self._receiver = sender, BucketReceiver(sender, buckets, device)
        self._transfer: Transfer | None = None

    def fetch(self, transfer: Transfer) -> None:
        """Remember the transfer; its sender offers nothing before the load."""
        self._transfer = transfer

    def receive(self) -> Iterator[NamedTensors]:
        assert self._transfer is not None, "fetch comes first"
        return self._receiver.receive(self._transfer)

    def end(self, transfer: Transfer, how: Word) -> None:
        self._sender.say(how, transfer.number)

    def close(self) -> None:
        self._receiver.close()


def open_channel(group: WeightGroup, worker: int, device: torch.device) -> IncomingWeights:
    """Connect the ``worker``-th worker of an engine to a group's sender, and wait until all have joined."""
    address = group.address
    match address.transport:
        case WeightTransport.shared_memory:
            return WholeInMemory(MemoryReceiver(address.endpoint))
        case WeightTransport.cuda_ipc:
            sender = SenderConnection(address.endpoint)
            mapped = MappedIncomingBuckets(sender, functools.partial(map_ticket, device=device))
            return InBuckets(sender, mapped, device)
        case _:
            assert address.process_group is not None
            sender = SenderConnection(address.endpoint)
            rank = group.first_rank + worker
            joined = NamedProcessGroup(address.process_group, rank=rank, device=device)
            return InBuckets(sender, BroadcastIncomingBuckets(joined, group.bucket_bytes), device)
