"""Named process groups over real gloo connections; each rank is a thread of this process."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import psutil
import pytest
import torch

from nemo_like.weight_transport.buckets import TensorSpec
from nemo_like.weight_transport.process_groups import GroupAddress, NamedProcessGroup, Rendezvous

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


def open_group(
    threads: ThreadPoolExecutor,
    name: str,
    receive: Callable[[NamedProcessGroup], object],
    *,
    num_ranks: int = 2,
    timeout_s: float = 30.0,
) -> tuple[NamedProcessGroup, list[Future]]:
    """Rank 0's side, and what ``receive`` returns on the others."""
    rendezvous = Rendezvous(LOOPBACK, timeout_s)
    address = GroupAddress(name, rendezvous.host, rendezvous.port, num_ranks, timeout_s)
    receivers = [
        threads.submit(lambda rank=rank: receive(NamedProcessGroup(address, rank=rank, device=CPU)))
        for rank in range(1, num_ranks)
    ]
    return NamedProcessGroup(address, rank=0, device=CPU, rendezvous=rendezvous), receivers


def assert_received(received: object, seed: int) -> None:
    assert isinstance(received, list)
    for (name, got), (expected_name, expected) in zip(received, values(seed), strict=True):
        assert name == expected_name
        assert got.dtype == expected.dtype
        torch.testing.assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("bucket_bytes", [1, 1024, 2**20])
def test_every_rank_receives_every_tensor_exactly(threads: ThreadPoolExecutor, bucket_bytes: int) -> None:
    def receive(group: NamedProcessGroup) -> list[list[tuple[str, torch.Tensor]]]:
        # Kept until the end: a buffer that were used again would show.
        rounds = [list(group.receive(TENSORS, bucket_bytes)) for _ in range(3)]
        return [[tensor for bucket in buckets for tensor in bucket] for buckets in rounds]

    group, receivers = open_group(threads, "pp0", receive, num_ranks=3)
    sent = [group.send(TENSORS, values(seed), bucket_bytes) for seed in range(3)]
    assert len(set(sent)) == 1
    for receiver in receivers:
        for seed, received in enumerate(receiver.result(timeout=30)):
            assert_received(received, seed)
    group.close()


def test_groups_of_two_names_carry_different_tensors_at_once(threads: ThreadPoolExecutor) -> None:
    def receive(group: NamedProcessGroup) -> list[tuple[str, torch.Tensor]]:
        return [tensor for bucket in group.receive(TENSORS, 64) for tensor in bucket]

    first, [first_receiver] = open_group(threads, "pp0", receive)
    second, [second_receiver] = open_group(threads, "pp1", receive)
    second.send(TENSORS, values(2), 64)
    first.send(TENSORS, values(1), 64)
    assert_received(first_receiver.result(timeout=30), 1)
    assert_received(second_receiver.result(timeout=30), 2)


def test_tensors_that_were_not_announced_are_refused(threads: ThreadPoolExecutor) -> None:
    group, _ = open_group(threads, "pp0", lambda group: group)
    swapped = [values(0)[1], values(0)[0]]
    with pytest.raises(ValueError, match=r"got .*'b.weight'.* announced at connect time was .*'a.weight'"):
        group.send(TENSORS, swapped, 2**20)
    with pytest.raises(ValueError, match=r"got .*'nothing'"):
        group.send(TENSORS, values(0)[:-1], 2**20)


def test_a_tensor_too_many_is_refused(threads: ThreadPoolExecutor) -> None:
    group, _ = open_group(threads, "pp0", lambda group: list(group.receive(TENSORS, 2**20)))
    with pytest.raises(ValueError, match=r"'e\.extra' to send, which was not announced"):
        group.send(TENSORS, [*values(0), ("e.extra", torch.ones(1))], 2**20)


def test_a_receiver_that_gives_up_fails_the_sender_long_before_the_deadline(
    threads: ThreadPoolExecutor,
) -> None:
    large = [TensorSpec(f"t{i}", "float32", (1 << 20,)) for i in range(16)]

    def give_up(group: NamedProcessGroup) -> None:
        next(group.receive(large, 2**20))
        group.close()

    group, _ = open_group(threads, "pp0", give_up, timeout_s=60.0)
    started_s = time.monotonic()
    with pytest.raises(RuntimeError, match="Connection"):
        group.send(large, ((spec.name, torch.ones(spec.shape)) for spec in large), 2**20)
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
