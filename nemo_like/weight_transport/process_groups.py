"""Named process groups between actors of different kinds, outside torch.distributed's global state.

A trainer rank and the workers of inference engines belong to worlds of their own; a named group
spans both. Several can exist at once, in one process too. gloo on CPU, NCCL on GPU.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch import distributed as dist

from nemo_like.weight_transport.buckets import TensorSpec, plan_buckets
from nemo_like.weight_transport.packing import check_exhausted, pack, view

# Broadcasts under way at once: one travels while the next is packed.
_MAX_BUCKETS_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class GroupAddress:
    """Where the ranks of one group meet."""

    name: str
    host: str
    port: int
    num_ranks: int
    timeout_s: float  # deadline for joining, and for each collective


class Rendezvous:
    """Rank 0's store, on a free port of ``host``'s interface alone."""

    def __init__(self, host: str, timeout_s: float) -> None:
        listener = socket.create_server((host, 0))
        self.host, self.port = host, int(listener.getsockname()[1])
        # The store owns the descriptor from here on.
        self.store = dist.TCPStore(
            host,
            self.port,
            is_master=True,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )


class NamedProcessGroup:
    """One rank's side of a named group; complete, on every rank, once the constructor returns.

    Raises RuntimeError (torch's DistError is one) when the other ranks do not come in time.
    """

    def __init__(
        self, address: GroupAddress, *, rank: int, device: torch.device, rendezvous: Rendezvous | None = None
    ) -> None:
        """Rank 0 brings the rendezvous that ``address`` leads to."""
        self.address, self.rank, self.device = address, rank, device
        self._timeout = timedelta(seconds=address.timeout_s)
        self._store = rendezvous.store if rendezvous else self._open_store()
        self._group: dist.Backend | None = self._open_group()
        self._meet()

    def broadcast(self, tensor: torch.Tensor) -> dist.Work:
        """Begin to send rank 0's tensor to all; on the other ranks, to receive into it."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = self._timeout
        return self._open.broadcast([tensor], options)

    def send(
        self, tensors: Sequence[TensorSpec], values: Iterable[tuple[str, torch.Tensor]], bucket_bytes: int
    ) -> int:
        """Rank 0: broadcast the values, which must be these tensors in this order. Returns bytes sent.

        Raises ValueError when a name, dtype or shape differs from its spec.
        """
        stream = iter(values)
        in_flight: list[tuple[dist.Work, torch.Tensor]] = []
        sent = 0
        for bucket in plan_buckets(tensors, bucket_bytes):
            buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self.device)
            pack(bucket, stream, buffer)
            in_flight.append((self.broadcast(buffer), buffer))
            sent += bucket.num_bytes
            if len(in_flight) == _MAX_BUCKETS_IN_FLIGHT:
                self._wait(in_flight.pop(0)[0])
        for work, _ in in_flight:
            self._wait(work)
        check_exhausted(stream)
        return sent

    def receive(
        self, tensors: Sequence[TensorSpec], bucket_bytes: int
    ) -> Iterator[list[tuple[str, torch.Tensor]]]:
        """The other ranks: the tensors, bucket by bucket, as views of a buffer that is never used again."""
        for bucket in plan_buckets(tensors, bucket_bytes):
            buffer = torch.empty(bucket.num_bytes, dtype=torch.uint8, device=self.device)
            self._wait(self.broadcast(buffer))
            yield [(slot.spec.name, view(buffer, slot)) for slot in bucket.slots]

    def close(self) -> None:
        """Drop the connections: a rank that waits for this one fails at once. Safe to call twice."""
        if self._group is not None:
            self._group.shutdown()
            # The connections live as long as the object does.
            self._group = None

    @property
    def _open(self) -> dist.Backend:
        if self._group is None:
            raise RuntimeError(f"group {self.address.name!r} is closed")
        return self._group

    def _open_store(self) -> dist.Store:
        address = self.address
        return dist.TCPStore(
            address.host, address.port, is_master=False, timeout=self._timeout, wait_for_workers=False
        )

    def _open_group(self) -> dist.Backend:
        address = self.address
        store = dist.PrefixStore(address.name, self._store)
        if self.device.type == "cpu":
            options = dist.ProcessGroupGloo._Options()
            options._timeout = self._timeout
            interface = _route_to(address.host, address.port)
            options._devices = [dist.ProcessGroupGloo.create_device(hostname=interface)]
            return dist.ProcessGroupGloo(store, self.rank, address.num_ranks, options)
        torch.cuda.set_device(self.device)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        return dist.ProcessGroupNCCL(store, self.rank, address.num_ranks, options)

    def _meet(self) -> None:
        """All ranks reach this point, over the very connections that will be used."""
        ones = torch.ones(1, device=self.device)
        self._wait(self._open.allreduce([ones]))
        if int(ones.item()) != self.address.num_ranks:
            raise RuntimeError(
                f"group {self.address.name!r}: {int(ones.item())} of {self.address.num_ranks} ranks answered"
            )

    def _wait(self, work: dist.Work) -> None:
        work.wait(self._timeout)
        if self.device.type == "cuda":
            # On CUDA wait() orders the stream only; buffers are reused and freed by the host.
            torch.cuda.current_stream(self.device).synchronize()


def _route_to(host: str, port: int) -> str:
    """This machine's address on the way to ``host``; loopback for loopback. Sends nothing."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])
