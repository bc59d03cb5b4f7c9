"""The channels through which one pipeline stage's weights get to the workers of every engine.

    transport       where the engines are    what a transfer costs
    shared_memory   on the sender's node     a copy in host memory that all workers map, made before they load
    cuda_ipc        on the sender's node     a copy into two buffers on the GPU, which all workers map
    collective      anywhere                 a broadcast over gloo or NCCL

cuda_ipc and collective send buckets of bounded size while the engines load.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from nemo_like.generation.interface import WeightAddress
from nemo_like.generation.options import WeightTransport
from nemo_like.policy.options import Device
from nemo_like.weight_transport.bucket_stream import NUM_BUFFERS, BucketSender, OutgoingBuckets
from nemo_like.weight_transport.buckets import TensorSpec
from nemo_like.weight_transport.connections import Receivers, Transfer
from nemo_like.weight_transport.cuda_memory import MappedOutgoingBuckets, make_ticket
from nemo_like.weight_transport.process_groups import (
    BroadcastOutgoingBuckets,
    GroupAddress,
    NamedProcessGroup,
    Rendezvous,
)
from nemo_like.weight_transport.shared_memory import MemorySender

Weights = Iterator[tuple[str, torch.Tensor]]


class WeightChannel(Protocol):
    """One pipeline stage's channel to the engines, as the sender uses it.

    In a transfer, ``offer`` is called before the engines load, and ``deliver`` while they load.
    """

    address: WeightAddress  # where the engines' workers join
    receivers: Receivers

    def open(self) -> None:
        """Wait until the workers of all engines, which were invited before, have joined."""

    def offer(self, transfer: Transfer, weights: Weights) -> None:
        """Make the weights ready, as far as that is possible while no engine receives."""

    def deliver(self) -> int:
        """Send the offered weights, and return their number of bytes.

        Raises GivenUp when the engines give the transfer up before they load.
        """

    def close(self) -> None:
        """Close the connections; a worker that still waits for the sender fails at once. Safe to call
        twice."""


class MemoryChannel:
    """Offers the weights in host memory that all engines' workers map.

    The weights are complete before any engine is asked to load, so an error in writing them changes no
    engine.
    """

    def __init__(self, receivers: Receivers, tensors: Sequence[TensorSpec]) -> None:
        self.receivers, self._tensors = receivers, tensors
        self.address = WeightAddress(WeightTransport.shared_memory, receivers.endpoint)
        self._memory: MemorySender | None = None
        self._num_bytes = 0

    def open(self) -> None:
        self._memory = MemorySender(self.receivers, self._tensors)

    def offer(self, transfer: Transfer, weights: Weights) -> None:
        assert self._memory is not None
        self._num_bytes = self._memory.offer(transfer, weights)

    def deliver(self) -> int:
        return self._num_bytes

    def close(self) -> None:
        self.receivers.close()


class BucketChannel:
    """Sends the weights in buckets while the engines' workers load them."""

    def __init__(
        self, receivers: Receivers, address: WeightAddress, open_buckets: Callable[[], OutgoingBuckets]
    ) -> None:
        """Keep ``open_buckets``; ``open`` calls it once all workers have joined, and it returns what carries
        the buckets."""
        self.receivers, self.address, self._open_buckets = receivers, address, open_buckets
        self._sender: BucketSender | None = None
        self._offered: tuple[Transfer, Weights] | None = None

    def open(self) -> None:
        self.receivers.open()
        self._sender = BucketSender(self.receivers, self._open_buckets())

    def offer(self, transfer: Transfer, weights: Weights) -> None:
        self._offered = transfer, weights

    def deliver(self) -> int:
        assert self._sender is not None and self._offered is not None
        return self._sender.send(*self._offered)

    def close(self) -> None:
        self.receivers.close()
        if self._sender is not None:
            self._sender.close()


def broadcast_channel(
    name: str, num_workers: int, timeout_s: float, host: str, device: Device, bucket_bytes: int
) -> BucketChannel:
    """Return a channel that broadcasts in a named process group, where this process has rank 0 and listens at
    ``host``."""
    receivers = Receivers(name, num_workers, timeout_s, host)
    rendezvous = Rendezvous(host, timeout_s)
    group = GroupAddress(name, rendezvous.host, rendezvous.port, 1 + num_workers, timeout_s)

    def open_buckets() -> OutgoingBuckets:
        joined = NamedProcessGroup(group, rank=0, device=_torch_device(device), rendezvous=rendezvous)
        return BroadcastOutgoingBuckets(joined, bucket_bytes)

    address = WeightAddress(WeightTransport.collective, receivers.endpoint, group)
    return BucketChannel(receivers, address, open_buckets)


def cuda_channel(name: str, num_workers: int, timeout_s: float, bucket_bytes: int) -> BucketChannel:
    """Return a channel through two buffers on this process's GPU, which the engines' workers map."""
    receivers = Receivers(name, num_workers, timeout_s)

    def open_buckets() -> OutgoingBuckets:
        device = _torch_device(Device.cuda)
        buffers = [torch.empty(bucket_bytes, dtype=torch.uint8, device=device) for _ in range(NUM_BUFFERS)]
        buckets = MappedOutgoingBuckets(
            buffers, make_ticket, lambda: torch.cuda.current_stream(device).synchronize()
        )
        buckets.hand_out(receivers)
        return buckets

    return BucketChannel(receivers, WeightAddress(WeightTransport.cuda_ipc, receivers.endpoint), open_buckets)


def _torch_device(device: Device) -> torch.device:
    return torch.device("cpu") if device is Device.cpu else torch.device("cuda", torch.cuda.current_device())
