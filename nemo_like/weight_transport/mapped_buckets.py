"""Buckets in two buffers of a CUDA device, which the receivers map once, when they connect.

A receiver maps a buffer with a ticket, which the sender makes for this receiver alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from torch import Tensor

from nemo_like.weight_transport.bucket_stream import NUM_BUFFERS
from nemo_like.weight_transport.connections import Receivers, SenderConnection


class MappedOutgoingBuckets:
    """The sender's end: it owns the buffers."""

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
            receivers.tell(functools.partial(self._make_ticket, buffer))

    def buffer(self, index: int) -> Tensor:
        return self._buffers[index % NUM_BUFFERS]

    def carry(self, index: int, bucket: Tensor) -> None:
        self._wait_until_written()

    def close(self) -> None:
        """Release the buffers; their memory is free once all receivers have closed."""
        self._buffers.clear()


class MappedIncomingBuckets:
    """A receiver's end: it maps the buffers with the tickets that the sender hands out."""

    def __init__(self, sender: SenderConnection, map_ticket: Callable[[bytes], Tensor]) -> None:
        self._buffers = [map_ticket(sender.hear("ticket for a buffer")) for _ in range(NUM_BUFFERS)]

    def bucket(self, index: int, num_bytes: int) -> Tensor:
        return self._buffers[index % NUM_BUFFERS][:num_bytes]

    def close(self) -> None:
        self._buffers.clear()
