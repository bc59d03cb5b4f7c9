"""Weights in buckets on one GPU from one process to others, without Ray and without vLLM.

The case on the CPU runs the same lines with files in place of CUDA memory.
"""

from __future__ import annotations

import functools
import multiprocessing
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from nemo_like.generation.options import WeightTransport
from nemo_like.weight_sync.channels import BucketChannel, cuda_channel
from nemo_like.weight_transport.bucket_stream import BucketReceiver, BucketSender
from nemo_like.weight_transport.connections import Endpoint, Receivers, SenderConnection, Transfer
from nemo_like.weight_transport.cuda_memory import MappedIncomingBuckets, map_ticket
from tests.unit.weight_transport.mapped_files import file_receiver, file_sender

SHAPES = {"a.weight": (33, 7), "b.weight": (640, 320), "c.scale": (), "d.weight": (1000, 1000)}
BUCKET_BYTES = 1 << 20  # a quarter of the largest tensor
NUM_READERS = 2
TIMEOUT_S = 60.0


def values(seed: int, device: str) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(name, torch.randn(shape, generator=generator).to(device)) for name, shape in SHAPES.items()]


def sums(tensors: list[tuple[str, torch.Tensor]]) -> dict[str, float]:
    return {name: tensor.double().sum().item() for name, tensor in tensors}


def read(endpoint: Endpoint, device: str, connection: Connection) -> None:
    """An engine's side: keeps every tensor that it gets, and answers each transfer with their sums."""
    if device == "cpu":
        receiver = file_receiver(endpoint, BUCKET_BYTES)
    else:
        torch.cuda.set_device(device)
        sender = SenderConnection(endpoint)
        mapped = MappedIncomingBuckets(sender, functools.partial(map_ticket, device=torch.device(device)))
        receiver = BucketReceiver(sender, mapped, torch.device(device))
    kept = []
    while (transfer := connection.recv()) is not None:
        kept.append([tensor for tensors in receiver.receive(transfer) for tensor in tensors])
        connection.send([sums(tensors) for tensors in kept])
    receiver.close()


@dataclass
class World:
    """A sender in this process and readers in others."""

    device: str
    sender: BucketSender | BucketChannel
    readers: list[Connection]
    processes: list[BaseProcess]

    def close(self) -> None:
        """End the readers, which release what they have mapped, and then the sender."""
        for reader, process in zip(self.readers, self.processes, strict=True):
            reader.send(None)
            process.join(TIMEOUT_S)
            assert process.exitcode == 0
        self.sender.close()
        self.readers, self.processes = [], []

    def send(self, transfer: Transfer) -> list[list[dict[str, float]]]:
        """What each reader has got so far."""
        for reader in self.readers:
            reader.send(transfer)
        weights = iter(values(transfer.version, self.device))
        if isinstance(self.sender, BucketChannel):
            self.sender.offer(transfer, weights)
            self.sender.deliver()
        else:
            self.sender.send(transfer, weights)
        answers = []
        for reader in self.readers:
            assert reader.poll(TIMEOUT_S), "a reader did not answer"
            answers.append(reader.recv())
        return answers


ON_GPU = pytest.param("cuda:0", marks=pytest.mark.gpu)


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """On the device that is the test's parameter."""
    on_gpu = request.param != "cpu"
    channel = cuda_channel("pp0", NUM_READERS, TIMEOUT_S, BUCKET_BYTES) if on_gpu else None
    listening = channel.receivers if channel else Receivers("pp0", NUM_READERS, TIMEOUT_S)
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(NUM_READERS)]
    processes = [
        context.Process(target=read, args=(listening.endpoint, request.param, theirs), daemon=True)
        for _, theirs in pipes
    ]
    for process in processes:
        process.start()
    with tempfile.TemporaryDirectory() as directory:
        if channel:
            assert channel.address.transport is WeightTransport.cuda_ipc
            channel.open()
        sender = channel or file_sender(listening, Path(directory), BUCKET_BYTES)
        started = World(request.param, sender, [ours for ours, _ in pipes], list(processes))
        yield started
        started.close()


@pytest.mark.parametrize("world", ["cpu", ON_GPU], indirect=True)
def test_every_version_arrives_and_none_is_overwritten_by_the_next(world: World) -> None:
    for number in (1, 2, 3):
        expected = [sums(values(version, "cpu")) for version in range(1, number + 1)]
        for held in world.send(Transfer(number, number)):
            for found, wanted in zip(held, expected, strict=True):
                assert found == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("world", [ON_GPU], indirect=True)
def test_the_sender_never_has_more_than_two_buckets_and_none_once_all_have_closed(world: World) -> None:
    world.send(Transfer(1, 1))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    weights = sum(value.nbytes for _, value in values(2, "cpu"))
    world.send(Transfer(2, 2))
    # The values themselves are on the GPU too.
    assert torch.cuda.max_memory_allocated() - before < weights + BUCKET_BYTES
    world.close()
    torch.cuda.ipc_collect()
    assert before - torch.cuda.memory_allocated() >= 2 * BUCKET_BYTES
