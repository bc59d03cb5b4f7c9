"""Buffers of the host that others map by ticket, as those of a CUDA device are: each is a file."""

from __future__ import annotations

from pathlib import Path

import torch

from nemo_like.weight_transport.bucket_stream import NUM_BUFFERS, BucketReceiver, BucketSender
from nemo_like.weight_transport.connections import Endpoint, Receivers, SenderConnection
from nemo_like.weight_transport.cuda_memory import MappedIncomingBuckets, MappedOutgoingBuckets

CPU = torch.device("cpu")


def file_sender(receivers: Receivers, directory: Path, bucket_bytes: int) -> BucketSender:
    """Wait for the receivers, and give them two buffers in ``directory``."""
    receivers.open()
    paths = [directory / f"buffer-{index}" for index in range(NUM_BUFFERS)]
    mapped = [_map(path, bucket_bytes) for path in paths]
    tickets = {buffer.data_ptr(): str(path).encode() for path, buffer in zip(paths, mapped, strict=True)}
    buckets = MappedOutgoingBuckets(mapped, lambda buffer: tickets[buffer.data_ptr()], lambda: None)
    buckets.hand_out(receivers)
    return BucketSender(receivers, buckets)


def file_receiver(endpoint: Endpoint, bucket_bytes: int) -> BucketReceiver:
    connection = SenderConnection(endpoint)
    mapped = MappedIncomingBuckets(connection, lambda ticket: _map(Path(ticket.decode()), bucket_bytes))
    return BucketReceiver(connection, mapped, CPU)


def _map(path: Path, num_bytes: int) -> torch.Tensor:
    return torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
