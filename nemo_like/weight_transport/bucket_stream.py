"""Sends weights bucket by bucket while the engines load them; ``OutgoingBuckets`` carries the buckets.

    sender                                      receivers
                         ◀────────── ready ──── about to load
      fill a buffer and carry it ══════════════▶
      announce what lies in it ────────────────▶ copy the tensors out
                         ◀─────────── took ────  load those that are complete
      fill the other buffer, ...
      announce the end ────────────────────────▶

A buffer is filled again when all receivers have copied its tensors out. So a sender needs memory for two
buckets, whatever the size of the model, and it notices at once when a receiver's process ends.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from nemo_like.weight_transport.buckets import from_lists, to_lists
from nemo_like.weight_transport.connections import Receivers, SenderConnection, Transfer, Word
from nemo_like.weight_transport.packing import Assembler, NamedTensors, pack

NUM_BUFFERS = 2


class OutgoingBuckets(Protocol):
    """Carries buckets, at the sender's end. The buckets of a transfer are counted from 0."""

    def buffer(self, index: int) -> Tensor:
        """Return the buffer for bucket ``index``, [bytes] uint8; all receivers have copied out what it held
        before."""

    def carry(self, index: int, bucket: Tensor) -> None:
        """Make the filled part of the bucket's buffer readable, or begin to send it. The caller then
        announces it."""

    def close(self) -> None:
        """Close the connection or release the memory that carries the buckets. Safe to call twice."""


class IncomingBuckets(Protocol):
    """Carries buckets, at a receiver's end."""

    def bucket(self, index: int, num_bytes: int) -> Tensor:
        """Wait for bucket ``index``, which the sender has announced, and return it, [bytes] uint8."""

    def close(self) -> None:
        """Close the connection or release the memory that carries the buckets. Safe to call twice."""


class BucketSender:
    """Sends one transfer after the other to receivers that are connected."""

    def __init__(self, receivers: Receivers, buckets: OutgoingBuckets) -> None:
        self._receivers, self._buckets = receivers, buckets

    def send(self, transfer: Transfer, values: NamedTensors) -> int:
        """Send the values to every receiver, and return their number of bytes.

        Raises GivenUp when the engines give the transfer up before they load; this sender can then send the
        next transfer. After any other error receivers may wait for the rest, so this sender must be closed.
        """
        self._receivers.wait_until_ready(transfer)
        num_buckets = num_bytes = 0
        for pieces, bucket in pack(values, self._buffer):
            self._buckets.carry(num_buckets, bucket)
            self._announce(transfer, len(bucket), to_lists(pieces))
            num_buckets += 1
            num_bytes += sum(piece.num_bytes for piece in pieces)
        self._announce(transfer, 0, None)
        self._receivers.wait_until_taken(num_buckets)
        return num_bytes

    def close(self) -> None:
        """Close the connections: receivers that wait fail at once. Safe to call twice."""
        self._receivers.close()
        self._buckets.close()

    def _buffer(self, index: int) -> Tensor:
        self._receivers.wait_until_taken(index + 1 - NUM_BUFFERS)
        return self._buckets.buffer(index)

    def _announce(self, transfer: Transfer, num_bytes: int, pieces: list | None) -> None:
        """Announce the next bucket with its pieces; None in place of pieces announces the end of the
        transfer."""
        self._receivers.broadcast(json.dumps([transfer.number, num_bytes, pieces]).encode())


class BucketReceiver:
    """Receives what a ``BucketSender`` sends, and puts the tensors together on ``device``."""

    def __init__(self, sender: SenderConnection, buckets: IncomingBuckets, device: torch.device) -> None:
        self._sender, self._buckets, self._device = sender, buckets, device

    def receive(self, transfer: Transfer) -> Iterator[list[tuple[str, Tensor]]]:
        """Yield the tensors as they become complete, in the order in which they were sent.

        The tensors have memory of their own. Raises RuntimeError when the sender is gone or sends another
        transfer, and TimeoutError when nothing comes.
        """
        self._sender.say(Word.ready, transfer.number)
        assembler = Assembler(self._device)
        index = 0
        while True:
            message = self._sender.hear(f"bucket {index} of version {transfer.version}")
            number, num_bytes, pieces = json.loads(message)
            if number != transfer.number:
                name = self._sender.endpoint.name
                raise RuntimeError(f"{name!r} sends transfer {number}, but {transfer} was asked for")
            if pieces is None:
                break
            tensors = assembler.add(from_lists(pieces), self._buckets.bucket(index, num_bytes))
            if self._device.type == "cuda":
                torch.cuda.current_stream(self._device).synchronize()
            self._sender.say(Word.took, number)
            index += 1
            yield tensors

    def close(self) -> None:
        """Close the connections: a sender that waits fails at once. Safe to call twice."""
        self._sender.close()
        self._buckets.close()
