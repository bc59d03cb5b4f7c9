"""Shared memory between a sender and receivers; each side is a thread of this process, or a process."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from nemo_like.weight_transport.buckets import TensorSpec
from nemo_like.weight_transport.connections import Endpoint, Receivers, Transfer
from nemo_like.weight_transport.packing import as_announced
from nemo_like.weight_transport.shared_memory import MemoryReceiver, MemorySender

TENSORS = (
    TensorSpec("a.weight", "float32", (33, 7)),
    TensorSpec("b.weight", "bfloat16", (5,)),
    TensorSpec("c.scale", "float32", ()),
    TensorSpec("d.ids", "int64", (2, 3)),
)


def values(seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (spec.name, (100 * torch.randn(spec.shape, generator=generator)).to(getattr(torch, spec.dtype)))
        for spec in TENSORS
    ]


def assert_holds(receiver: MemoryReceiver, seed: int) -> None:
    for (name, found), (expected_name, expected) in zip(receiver.tensors(), values(seed), strict=True):
        assert name == expected_name
        assert found.dtype == expected.dtype
        torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.fixture
def connected() -> Iterator[tuple[MemorySender, list[MemoryReceiver]]]:
    """A sender with two receivers."""
    with ThreadPoolExecutor() as threads:
        listening = Receivers("pp0", num_receivers=2, timeout_s=5.0)
        joins = [threads.submit(MemoryReceiver, listening.endpoint) for _ in range(2)]
        sender = MemorySender(listening, TENSORS)
        receivers = [join.result(5) for join in joins]
    yield sender, receivers
    sender.close()
    for receiver in receivers:
        receiver.close()


def test_every_receiver_sees_every_version_exactly(
    connected: tuple[MemorySender, list[MemoryReceiver]],
) -> None:
    sender, receivers = connected
    for number, version in enumerate((0, 1, 5)):
        transfer = Transfer(number, version)
        assert sender.offer(transfer, values(version)) >= sum(spec.num_bytes for spec in TENSORS)
        for receiver in receivers:
            receiver.fetch(transfer)
            assert_holds(receiver, version)


def test_the_receivers_hear_that_a_version_could_not_be_written_and_get_it_when_it_is_tried_again(
    connected: tuple[MemorySender, list[MemoryReceiver]],
) -> None:
    sender, receivers = connected
    with pytest.raises(ValueError, match=r"'d.ids'.* announced at connect time was|got .*'nothing'"):
        sender.offer(Transfer(1, 7), as_announced(values(1)[:-1], TENSORS))
    with pytest.raises(ValueError, match=r"'e\.extra' to send, which was not announced"):
        sender.offer(Transfer(2, 7), as_announced([*values(1), ("e.extra", torch.ones(1))], TENSORS))
    for receiver in receivers:
        with pytest.raises(RuntimeError, match="'pp0' could not send version 7"):
            receiver.fetch(Transfer(1, 7))
    # The second failure is still unread when the same version is tried once more.
    sender.offer(Transfer(3, 7), values(7))
    for receiver in receivers:
        receiver.fetch(Transfer(3, 7))
        assert_holds(receiver, 7)


def test_a_sender_of_many_tensors_does_not_wait_for_receivers_that_listen_later() -> None:
    """What lies where is more than a socket holds."""
    many = [
        TensorSpec(f"model.layers.{i}.mlp.experts.down_proj.weight", "float32", (1,)) for i in range(5_000)
    ]
    listening = Receivers("pp0", num_receivers=1, timeout_s=20.0)
    with ThreadPoolExecutor(1) as threads:
        join = threads.submit(MemoryReceiver, listening.endpoint)
        sender = MemorySender(listening, many)
        receiver = join.result(20)
    sender.offer(Transfer(1, 1), [(spec.name, torch.full((1,), float(i))) for i, spec in enumerate(many)])
    receiver.fetch(Transfer(1, 1))
    assert [value.item() for _, value in receiver.tensors()] == list(range(5_000))
    sender.close()
    receiver.close()


def test_another_version_than_the_one_asked_for_is_refused(
    connected: tuple[MemorySender, list[MemoryReceiver]],
) -> None:
    sender, receivers = connected
    sender.offer(Transfer(1, 3), values(3))
    with pytest.raises(RuntimeError, match="'pp0' sent version 3 in transfer 1, but version 2"):
        receivers[0].fetch(Transfer(1, 2))


def test_a_sender_that_goes_away_fails_its_receivers_at_once(
    connected: tuple[MemorySender, list[MemoryReceiver]],
) -> None:
    sender, receivers = connected
    sender.close()
    for receiver in receivers:
        with pytest.raises(RuntimeError, match="went away while version 1 was waited for"):
            receiver.fetch(Transfer(1, 1))


def test_a_sender_that_says_nothing_is_waited_for_until_the_deadline_only() -> None:
    listening = Receivers("pp0", num_receivers=1, timeout_s=0.2)
    with ThreadPoolExecutor(1) as threads:
        join = threads.submit(MemoryReceiver, listening.endpoint)
        sender = MemorySender(listening, TENSORS)
        with pytest.raises(TimeoutError, match=r"announced no version 1 within 0\.2 s"):
            join.result(5).fetch(Transfer(1, 1))
    sender.close()


def test_receivers_that_never_come_are_counted_at_the_deadline() -> None:
    listening = Receivers("pp0", num_receivers=2, timeout_s=0.1)
    with pytest.raises(TimeoutError, match="2 of 2 receivers did not connect"):
        MemorySender(listening, TENSORS)
    listening.close()


def test_nothing_is_left_in_the_file_system_once_all_have_met() -> None:
    listening = Receivers("pp0", num_receivers=0, timeout_s=5.0)
    path = listening.endpoint.location
    assert isinstance(path, str)
    assert Path(path).exists()
    sender = MemorySender(listening, TENSORS)
    assert not Path(path).parent.exists()
    sender.close()


def _receive(endpoint: Endpoint, ready: multiprocessing.SimpleQueue) -> None:
    receiver = MemoryReceiver(endpoint)
    receiver.fetch(Transfer(1, 4))
    assert_holds(receiver, 4)
    ready.put(os.getpid())


def test_another_process_reads_what_was_written_here() -> None:
    context = multiprocessing.get_context("fork")
    listening = Receivers("pp0", num_receivers=1, timeout_s=20.0)
    ready = context.SimpleQueue()
    process = context.Process(target=_receive, args=(listening.endpoint, ready))
    process.start()
    sender = MemorySender(listening, TENSORS)
    sender.offer(Transfer(1, 4), values(4))
    process.join(20)
    assert process.exitcode == 0
    assert ready.get() == process.pid
    sender.close()
