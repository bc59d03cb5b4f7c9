"""Named process groups over real gloo connections; each rank is a thread of this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import psutil
import pytest
import torch

from nemo_like.weight_transport.bucket_stream import BucketReceiver, BucketSender
from nemo_like.weight_transport.buckets import TensorSpec
from nemo_like.weight_transport.connections import Receivers, SenderConnection, Transfer
from nemo_like.weight_transport.process_groups import (
    BroadcastIncomingBuckets,
    BroadcastOutgoingBuckets,
    GroupAddress,
    NamedProcessGroup,
    Rendezvous,
)

CPU = torch.device("cpu")
LOOPBACK = "127.0.0.1"
TENSORS = (
    TensorSpec("a.weight", "float32", (33, 7)),
    TensorSpec("b.weight", "bfloat16", (5,)),
    TensorSpec("c.scale", "float32", ()),
    TensorSpec("d.ids", "int64", (2, 3)),
)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    executor = ThreadPoolExecutor()
    yield executor
    executor.shutdown(wait=True, cancel_futures=True)


def values(seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (spec.name, (100 * torch.randn(spec.shape, generator=generator)).to(getattr(torch, spec.dtype)))
        for spec in TENSORS
    ]


@dataclass
class Sending:
    """Rank 0's side, and what each of the other ranks returns."""

    sender: BucketSender
    receivers: list[Future]


def open_group(
    threads: ThreadPoolExecutor,
    name: str,
    receive: Callable[[BucketReceiver], object],
    *,
    bucket_bytes: int = 64,
    num_ranks: int = 2,
    timeout_s: float = 30.0,
) -> Sending:
    """Join a group; each other rank calls ``receive``."""
    listening = Receivers(name, num_ranks - 1, timeout_s, LOOPBACK)
    rendezvous = Rendezvous(LOOPBACK, timeout_s)
    address = GroupAddress(name, rendezvous.host, rendezvous.port, num_ranks, timeout_s)

    def join(rank: int) -> object:
        connection = SenderConnection(listening.endpoint)
        group = NamedProcessGroup(address, rank=rank, device=CPU)
        return receive(BucketReceiver(connection, BroadcastIncomingBuckets(group, bucket_bytes), CPU))

    receivers = [threads.submit(join, rank) for rank in range(1, num_ranks)]
    listening.open()
    group = NamedProcessGroup(address, rank=0, device=CPU, rendezvous=rendezvous)
    return Sending(BucketSender(listening, BroadcastOutgoingBuckets(group, bucket_bytes)), receivers)


def receive_once(receiver: BucketReceiver) -> list[tuple[str, torch.Tensor]]:
    return [tensor for tensors in receiver.receive(Transfer(1, 1)) for tensor in tensors]


def assert_received(received: object, seed: int) -> None:
    assert isinstance(received, list)
    for (name, got), (expected_name, expected) in zip(received, values(seed), strict=True):
        assert name == expected_name
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("bucket_bytes", [7, 1024, 2**20])
def test_every_rank_receives_every_tensor_exactly(threads: ThreadPoolExecutor, bucket_bytes: int) -> None:
    def receive(receiver: BucketReceiver) -> list[list[tuple[str, torch.Tensor]]]:
        # Kept until the end: tensors whose memory were used again would show.
        rounds = [list(receiver.receive(Transfer(number, number))) for number in range(3)]
        return [[tensor for bucket in buckets for tensor in bucket] for buckets in rounds]

    group = open_group(threads, "pp0", receive, bucket_bytes=bucket_bytes, num_ranks=3)
    sent = [group.sender.send(Transfer(seed, seed), values(seed)) for seed in range(3)]
    assert sent == [sum(spec.num_bytes for spec in TENSORS)] * 3
    for receiver in group.receivers:
        for seed, received in enumerate(receiver.result(timeout=30)):
            assert_received(received, seed)
    group.sender.close()


def test_groups_of_two_names_carry_different_tensors_at_once(threads: ThreadPoolExecutor) -> None:
    first = open_group(threads, "pp0", receive_once)
    second = open_group(threads, "pp1", receive_once)
    second.sender.send(Transfer(1, 1), values(2))
    first.sender.send(Transfer(1, 1), values(1))
    assert_received(first.receivers[0].result(timeout=30), 1)
    assert_received(second.receivers[0].result(timeout=30), 2)


def test_a_sender_that_gives_up_fails_the_receivers_long_before_the_deadline(
    threads: ThreadPoolExecutor,
) -> None:
    group = open_group(threads, "pp0", receive_once, timeout_s=60.0)

    def broken() -> Iterator[tuple[str, torch.Tensor]]:
        yield values(0)[0]
        raise ValueError("not as announced")

    started_s = time.monotonic()
    with pytest.raises(ValueError, match="not as announced"):
        group.sender.send(Transfer(1, 1), broken())
    group.sender.close()
    with pytest.raises(RuntimeError, match=r"'pp0' went away|[Cc]onnection"):
        group.receivers[0].result(timeout=60)
    assert time.monotonic() - started_s < 20


def test_a_receiver_that_gives_up_fails_the_sender_long_before_the_deadline(
    threads: ThreadPoolExecutor,
) -> None:
    large = [(f"t{i}", torch.ones(1 << 20)) for i in range(16)]

    def give_up(receiver: BucketReceiver) -> None:
        next(receiver.receive(Transfer(1, 1)))
        receiver.close()

    group = open_group(threads, "pp0", give_up, bucket_bytes=2**20, timeout_s=60.0)
    started_s = time.monotonic()
    with pytest.raises(RuntimeError, match=r"a receiver went away|Connection"):
        group.sender.send(Transfer(1, 1), large)
    assert time.monotonic() - started_s < 20


def test_a_rank_that_never_comes_is_waited_for_until_the_deadline_only() -> None:
    rendezvous = Rendezvous(LOOPBACK, 1.0)
    address = GroupAddress("pp0", rendezvous.host, rendezvous.port, 2, timeout_s=1.0)
    started_s = time.monotonic()
    with pytest.raises(RuntimeError):
        NamedProcessGroup(address, rank=0, device=CPU, rendezvous=rendezvous)
    assert time.monotonic() - started_s < 20


def test_a_loopback_rendezvous_cannot_be_reached_from_outside() -> None:
    rendezvous = Rendezvous(LOOPBACK, 5.0)
    listening = [
        connection.laddr
        for connection in psutil.Process().net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN and connection.laddr.port == rendezvous.port
    ]
    assert [address.ip for address in listening] == [LOOPBACK]
