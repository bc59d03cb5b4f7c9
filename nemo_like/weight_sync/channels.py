"""The channels through which one pipeline stage's weights get to the workers of every engine.

channel            where the engines are    what a transfer costs
MemoryChannel      on the sender's node     one copy, on the host or on a GPU, which all of them map
CollectiveChannel  anywhere                 a broadcast, bucket by bucket, over gloo or NCCL
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from nemo_like.config.schema import Device
from nemo_like.weight_transport.buckets import TensorSpec
from nemo_like.weight_transport.process_groups import GroupAddress, NamedProcessGroup, Rendezvous
from nemo_like.weight_transport.shared_memory import MemoryAddress, MemorySender, Transfer

Weights = Iterator[tuple[str, torch.Tensor]]


class WeightChannel(Protocol):
    """The sender's side, for one pipeline stage.

    In a transfer, ``offer`` is called before the engines load, ``deliver`` while they load, and ``release``
    when they have loaded.
    """

    @property
    def address(self) -> GroupAddress | MemoryAddress:
        """Where the engines' workers join."""

    def open(self) -> None:
        """Wait until all engines' workers have joined; they were invited before."""

    def offer(self, transfer: Transfer, weights: Weights) -> None:
        """Make the weights ready, as far as that is possible while no engine receives."""

    def deliver(self) -> int:
        """Send the offered weights, and return their number of bytes."""

    def release(self) -> None:
        """Release what holds the delivered weights. To be called when every engine has loaded them.

        A channel on which this is not called keeps them until its next offer.
        """

    def close(self) -> None:
        """Close the connections: a worker that waits for this side fails at once. Safe to call twice."""


class MemoryChannel:
    """Offers the weights in memory that all engines' workers map.

    They lie ready before any engine is asked to load, so a failure to write them touches no engine.
    """

    def __init__(
        self, name: str, tensors: Sequence[TensorSpec], num_workers: int, timeout_s: float, device: Device
    ) -> None:
        self._memory = MemorySender(name, tensors, num_workers, timeout_s, _torch_device(device))
        self._num_bytes = 0

    @property
    def address(self) -> MemoryAddress:
        return self._memory.address

    def open(self) -> None:
        self._memory.open()

    def offer(self, transfer: Transfer, weights: Weights) -> None:
        self._num_bytes = self._memory.offer(transfer, weights)

    def deliver(self) -> int:
        return self._num_bytes

    def release(self) -> None:
        self._memory.release()

    def close(self) -> None:
        self._memory.close()


class CollectiveChannel:
    """Broadcasts the weights as rank 0 of a named group; the other ranks are the engines' workers."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        address: GroupAddress,
        tensors: Sequence[TensorSpec],
        bucket_bytes: int,
        device: Device,
    ) -> None:
        self.address = address
        self._rendezvous, self._tensors, self._bucket_bytes = rendezvous, tensors, bucket_bytes
        self._device = _torch_device(device)
        self._group: NamedProcessGroup | None = None
        self._offered: Weights = iter(())

    def open(self) -> None:
        self._group = NamedProcessGroup(
            self.address, rank=0, device=self._device, rendezvous=self._rendezvous
        )

    def offer(self, transfer: Transfer, weights: Weights) -> None:
        self._offered = weights

    def deliver(self) -> int:
        if self._group is None:
            raise RuntimeError(f"group {self.address.name!r} is not open, so nothing can be sent")
        return self._group.send(self._tensors, self._offered, self._bucket_bytes)

    def release(self) -> None:
        """Do nothing: a broadcast keeps no weights."""

    def close(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None


def _torch_device(device: Device) -> torch.device:
    return torch.device("cpu") if device is Device.cpu else torch.device("cuda", torch.cuda.current_device())
