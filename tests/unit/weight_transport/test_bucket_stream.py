"""The agreement on buckets between a sender and receivers that map its two buffers, here files."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from nemo_like.weight_transport.bucket_stream import BucketReceiver, BucketSender
from nemo_like.weight_transport.connections import Endpoint, GivenUp, Receivers, Transfer, Word
from tests.unit.weight_transport.mapped_files import file_receiver, file_sender

BUCKET_BYTES = 128
TIMEOUT_S = 20.0


def values(seed: int) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(f"t{i}", torch.randn(10 + 7 * i, generator=generator)) for i in range(12)]


@dataclass
class World:
    listening: Receivers
    sender: BucketSender
    receivers: list[BucketReceiver]
    threads: ThreadPoolExecutor

    def receive(self, transfer: Transfer) -> list[Future]:
        return [self.threads.submit(lambda r=r: list(r.receive(transfer))) for r in self.receivers]


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A sender with two receivers."""
    with ThreadPoolExecutor() as threads:
        listening = Receivers("pp0", 2, TIMEOUT_S)
        joins = [threads.submit(file_receiver, listening.endpoint, BUCKET_BYTES) for _ in range(2)]
        sender = file_sender(listening, tmp_path, BUCKET_BYTES)
        world = World(listening, sender, [join.result(TIMEOUT_S) for join in joins], threads)
        yield world
        sender.close()
        for receiver in world.receivers:
            receiver.close()


def assert_received(received: Future, seed: int) -> None:
    flat = [tensor for part in received.result(TIMEOUT_S) for tensor in part]
    for (name, found), (expected_name, expected) in zip(flat, values(seed), strict=True):
        assert name == expected_name
        assert torch.equal(found, expected)


def test_many_times_the_buffers_arrive_and_are_kept(world: World) -> None:
    kept = []
    for number in (1, 2, 3):
        received = world.receive(Transfer(number, number))
        sent = world.sender.send(Transfer(number, number), values(number))
        assert sent == sum(value.nbytes for _, value in values(number)) > 10 * BUCKET_BYTES
        for one in received:
            one.result(TIMEOUT_S)  # a receiver begins the next transfer when this one has ended
        kept.append((received, number))
    for received, number in kept:
        for one in received:
            assert_received(one, number)


def test_a_buffer_is_not_written_again_before_every_receiver_took_what_was_in_it(world: World) -> None:
    """One receiver stops after its first bucket, so the sender fills two more buffers and no further."""
    slow, quick = world.receivers
    first = slow.receive(Transfer(1, 1))
    rest = world.threads.submit(lambda: list(quick.receive(Transfer(1, 1))))
    packed: list[str] = []

    def watched() -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in values(1):
            packed.append(name)
            yield name, value

    sending = world.threads.submit(world.sender.send, Transfer(1, 1), watched())
    parts = [next(first)]
    time.sleep(0.2)
    assert len(packed) <= 6
    assert not sending.done()
    parts += list(first)
    assert sending.result(TIMEOUT_S)
    assert len(packed) == 12
    assert_received(rest, 1)
    done: Future = Future()
    done.set_result(parts)
    assert_received(done, 1)


def test_a_transfer_that_is_given_up_sends_nothing_and_the_next_one_arrives(world: World) -> None:
    for receiver in world.receivers:
        receiver._sender.say(Word.gave_up, 1)
    with pytest.raises(GivenUp, match=r"gave up Transfer\(number=1, version=5\) of 'pp0'"):
        world.sender.send(Transfer(1, 5), values(5))
    assert not world.listening.all_loaded(1)
    received = world.receive(Transfer(2, 5))
    world.sender.send(Transfer(2, 5), values(5))
    for one, receiver in zip(received, world.receivers, strict=True):
        assert_received(one, 5)
        receiver._sender.say(Word.loaded, 2)
    assert world.listening.all_loaded(2)


def test_receivers_that_never_get_ready_are_counted_at_the_deadline(tmp_path: Path) -> None:
    listening = Receivers("pp0", 1, 0.2)
    with ThreadPoolExecutor() as threads:
        join = threads.submit(file_receiver, listening.endpoint, BUCKET_BYTES)
        sender = file_sender(listening, tmp_path, BUCKET_BYTES)
        receiver = join.result(TIMEOUT_S)
    with pytest.raises(TimeoutError, match=r"'pp0': 1 of 1 receivers did not get ready .* within 0\.2 s"):
        sender.send(Transfer(1, 1), values(1))
    with pytest.raises(TimeoutError, match=r"announced no bucket 0 of version 1 within 0\.2 s"):
        list(receiver.receive(Transfer(1, 1)))
    sender.close()
    receiver.close()


def _die_at_the_second_bucket(endpoint: Endpoint) -> None:
    parts = file_receiver(endpoint, BUCKET_BYTES).receive(Transfer(1, 1))
    next(parts)
    next(parts)
    os._exit(1)


def _die_before_it_is_ready(endpoint: Endpoint) -> None:
    file_receiver(endpoint, BUCKET_BYTES)
    os._exit(1)


@pytest.mark.parametrize("dying", [_die_at_the_second_bucket, _die_before_it_is_ready])
def test_a_receiver_that_dies_is_noticed_at_once(tmp_path: Path, dying: object) -> None:
    listening = Receivers("pp0", 1, TIMEOUT_S)
    process = multiprocessing.get_context("fork").Process(target=dying, args=(listening.endpoint,))
    process.start()
    sender = file_sender(listening, tmp_path, BUCKET_BYTES)
    started_s = time.monotonic()
    with pytest.raises(RuntimeError, match="'pp0': a receiver went away"):
        sender.send(Transfer(1, 1), values(1))
    assert time.monotonic() - started_s < TIMEOUT_S / 2
    process.join(TIMEOUT_S)
    sender.close()


def test_a_sender_that_goes_away_is_noticed_at_once(world: World) -> None:
    received = world.receive(Transfer(1, 1))
    world.listening.wait_until_ready(Transfer(1, 1))
    world.sender.close()
    for one in received:
        with pytest.raises(RuntimeError, match="'pp0' went away while bucket 0 of version 1 was waited for"):
            one.result(TIMEOUT_S)
    with pytest.raises(RuntimeError, match="'pp0' is closed, so its receivers must connect anew"):
        world.sender.send(Transfer(2, 2), values(2))
