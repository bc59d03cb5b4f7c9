"""Tensors on one GPU from one process to others, without Ray and without vLLM.

The cases marked gpu need a CUDA device; that on the CPU runs the same lines with memory of the host.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection

import pytest
import torch

from nemo_like.weight_transport.buckets import TensorSpec
from nemo_like.weight_transport.shared_memory import MemoryAddress, MemoryReceiver, MemorySender, Transfer

TENSORS = (
    TensorSpec("a.weight", "float32", (33, 7)),
    TensorSpec("b.weight", "bfloat16", (64, 32)),
    TensorSpec("c.scale", "float32", ()),
)
NUM_READERS = 2
TIMEOUT_S = 60.0

Held = dict[str, list[float]]


def values(seed: int, device: str) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (spec.name, torch.randn(spec.shape, generator=generator).to(device, getattr(torch, spec.dtype)))
        for spec in TENSORS
    ]


def read(address: MemoryAddress, device: str, connection: Connection) -> None:
    """An engine's side: keeps its version until another is whole; answers each transfer with what it has."""
    receiver = MemoryReceiver(address, TENSORS, torch.device(device))
    held: Held = {}
    while (transfer := connection.recv()) is not None:
        said = ""
        try:
            receiver.fetch(transfer)
            held = {name: tensor.double().flatten().tolist() for name, tensor in receiver.tensors()}
        except RuntimeError as error:
            said = str(error)
        receiver.release()
        connection.send((said, held))
    receiver.close()


@dataclass
class World:
    """A sender in this process and readers in others."""

    device: str
    sender: MemorySender
    readers: list[Connection]

    def fetch(self, transfer: Transfer) -> list[tuple[str, Held]]:
        for reader in self.readers:
            reader.send(transfer)
        answers = []
        for reader in self.readers:
            assert reader.poll(TIMEOUT_S), "a reader did not answer"
            answers.append(reader.recv())
        return answers


ON_GPU = pytest.param("cuda:0", marks=pytest.mark.gpu)


@pytest.fixture
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """On the device that is the test's parameter."""
    sender = MemorySender("pp0", TENSORS, NUM_READERS, TIMEOUT_S, torch.device(request.param))
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(NUM_READERS)]
    processes = [
        context.Process(target=read, args=(sender.address, request.param, theirs), daemon=True)
        for _, theirs in pipes
    ]
    for process in processes:
        process.start()
    sender.open()
    readers = [ours for ours, _ in pipes]
    yield World(request.param, sender, readers)
    for reader in readers:
        reader.send(None)
    for process in processes:
        process.join(TIMEOUT_S)
        assert process.exitcode == 0
    sender.close()


def expected(seed: int) -> Held:
    return {name: tensor.double().flatten().tolist() for name, tensor in values(seed, "cpu")}


@pytest.mark.parametrize("world", ["cpu", ON_GPU], indirect=True)
def test_every_version_arrives_whole_and_a_failed_one_leaves_that_in_force(world: World) -> None:
    world.sender.offer(Transfer(1, 10), values(10, world.device))
    assert world.fetch(Transfer(1, 10)) == [("", expected(10))] * NUM_READERS
    with pytest.raises(ValueError, match=r"got .*'nothing'"):
        world.sender.offer(Transfer(2, 11), values(11, world.device)[:-1])
    failed = ("'pp0' could not send version 11", expected(10))
    assert world.fetch(Transfer(2, 11)) == [failed] * NUM_READERS
    world.sender.offer(Transfer(3, 11), values(11, world.device))
    assert world.fetch(Transfer(3, 11)) == [("", expected(11))] * NUM_READERS


@pytest.mark.parametrize("world", [ON_GPU], indirect=True)
def test_the_senders_memory_is_free_once_all_have_let_go_of_it(world: World) -> None:
    before = torch.cuda.memory_allocated()
    for number in (1, 2):
        world.sender.offer(Transfer(number, number), values(number, world.device))
        assert torch.cuda.memory_allocated() > before
        world.fetch(Transfer(number, number))
        world.sender.release()
        assert torch.cuda.memory_allocated() == before
