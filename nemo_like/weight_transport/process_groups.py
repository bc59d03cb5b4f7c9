"""Named process groups between actors of different kinds, outside torch.distributed's global state.

Policy workers and the workers of an engine belong to different torch.distributed worlds; a named group
spans both. A process can be in several groups at once. They use gloo on CPU and NCCL on GPU.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed as dist

from nemo_like.weight_transport.bucket_stream import NUM_BUFFERS


@dataclass(frozen=True, slots=True)
class GroupAddress:
    """The address where the ranks of one group meet."""

    name: str
    host: str
    port: int
    num_ranks: int
    timeout_s: float  # deadline for joining, and for each collective


class Rendezvous:
    """The store through which a group's ranks find each other; rank 0 holds it.

    It listens on the interface of ``host`` alone, where torch by itself listens on all interfaces and lets
    everyone read and write. Port 0 means any free port.
    """

    def __init__(self, host: str, timeout_s: float, port: int = 0) -> None:
        """Listen at ``host`` and ``port``. Raises OSError where the port is taken."""
        listener = socket.create_server((host, port))
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


def joined_store(host: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Return the store that rank 0 holds as ``Rendezvous``; wait until rank 0 listens, at most until the
    deadline."""
    timeout = timedelta(seconds=timeout_s)
    return dist.TCPStore(host, port, is_master=False, timeout=timeout, wait_for_workers=False)


def file_store(file: Path, timeout_s: float) -> dist.FileStore:
    """Return a store that is kept in ``file``, so only users who may read the file's folder can join.

    All ranks must be on one machine, and each set of ranks needs a file of its own.
    """
    store = dist.FileStore(str(file))
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


class NamedProcessGroup:
    """One rank's side of a named group. The constructor returns once all ranks have joined.

    Raises RuntimeError (torch's DistError is one) when the other ranks do not join in time.
    """

    def __init__(
        self, address: GroupAddress, *, rank: int, device: torch.device, rendezvous: Rendezvous | None = None
    ) -> None:
        """Join the group and wait for the others. Rank 0 passes the ``rendezvous`` that listens at
        ``address``."""
        self.address, self.rank, self.device = address, rank, device
        self._timeout = timedelta(seconds=address.timeout_s)
        self._store: dist.Store = (
            rendezvous.store if rendezvous else joined_store(address.host, address.port, address.timeout_s)
        )
        self._group: dist.Backend | None = self._open_group()
        self._meet()

    def broadcast(self, tensor: torch.Tensor) -> dist.Work:
        """Begin a broadcast: rank 0 sends its tensor, the other ranks receive into theirs."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        options.timeout = self._timeout
        return self._open.broadcast([tensor], options)

    def wait(self, work: dist.Work) -> None:
        """Wait until the collective is over, at most until the deadline."""
        work.wait(self._timeout)
        if self.device.type == "cuda":
            # On CUDA wait() only orders the stream, but the host goes on to reuse and free the buffers.
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        """Close the connections: a rank that waits for this one fails at once. Safe to call twice."""
        if self._group is not None:
            # NCCL's shutdown waits for what is under way, which may never end.
            self._group.abort() if self.device.type == "cuda" else self._group.shutdown()
            # The connections live as long as the object does.
            self._group = None

    @property
    def _open(self) -> dist.Backend:
        if self._group is None:
            raise RuntimeError(f"group {self.address.name!r} is closed")
        return self._group

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
        """Wait until all ranks have called this, over the connections that broadcasts will use."""
        ones = torch.ones(1, device=self.device)
        self.wait(self._open.allreduce([ones]))
        if int(ones.item()) != self.address.num_ranks:
            raise RuntimeError(
                f"group {self.address.name!r}: {int(ones.item())} of {self.address.num_ranks} ranks answered"
            )


class BroadcastOutgoingBuckets:
    """The sender's end: it broadcasts buckets in a group, as the group's rank 0."""

    def __init__(self, group: NamedProcessGroup, bucket_bytes: int) -> None:
        self._group = group
        self._buffers = [
            torch.empty(bucket_bytes, dtype=torch.uint8, device=group.device) for _ in range(NUM_BUFFERS)
        ]
        self._under_way: dict[int, dist.Work] = {}

    def buffer(self, index: int) -> torch.Tensor:
        work = self._under_way.pop(index % NUM_BUFFERS, None)
        if work is not None:
            self._group.wait(work)
        return self._buffers[index % NUM_BUFFERS]

    def carry(self, index: int, bucket: torch.Tensor) -> None:
        self._under_way[index % NUM_BUFFERS] = self._group.broadcast(bucket)

    def close(self) -> None:
        self._group.close()


class BroadcastIncomingBuckets:
    """A receiver's end: it receives the broadcasts of the group's rank 0."""

    def __init__(self, group: NamedProcessGroup, bucket_bytes: int) -> None:
        self._group = group
        self._buffer = torch.empty(bucket_bytes, dtype=torch.uint8, device=group.device)

    def bucket(self, index: int, num_bytes: int) -> torch.Tensor:
        bucket = self._buffer[:num_bytes]
        self._group.wait(self._group.broadcast(bucket))
        return bucket

    def close(self) -> None:
        self._group.close()


def _route_to(host: str, port: int) -> str:
    """Return this machine's own address on the route to ``host``, which is loopback for a loopback host.
    Sends nothing."""
    family = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0][0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return str(probe.getsockname()[0])
