"""A named process group between two processes of one node: NCCL between two GPUs, and gloo without."""

from __future__ import annotations

import multiprocessing
from multiprocessing.connection import Connection

import pytest
import torch

from nemo_like.weight_transport.process_groups import GroupAddress, NamedProcessGroup, Rendezvous

TIMEOUT_S = 60.0
SHAPE = (1000, 1000)


def values(seed: int, device: torch.device) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(device)


def receive(address: GroupAddress, device: str, connection: Connection) -> None:
    own = torch.device(device)
    group = NamedProcessGroup(address, rank=1, device=own)
    while (seed := connection.recv()) is not None:
        received = torch.zeros(SHAPE, device=own)
        group.wait(group.broadcast(received))
        connection.send(torch.equal(received, values(seed, own)))
    group.close()


@pytest.mark.parametrize("kind", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_one_process_broadcasts_another_receives(kind: str) -> None:
    if kind == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL refuses two processes on one GPU, so this needs two CUDA devices")
    sending, receiving = ("cpu", "cpu") if kind == "cpu" else ("cuda:0", "cuda:1")
    rendezvous = Rendezvous("127.0.0.1", TIMEOUT_S)
    address = GroupAddress("group", rendezvous.host, rendezvous.port, 2, TIMEOUT_S)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=receive, args=(address, receiving, theirs), daemon=True)
    process.start()
    own = torch.device(sending)
    group = NamedProcessGroup(address, rank=0, device=own, rendezvous=rendezvous)
    for seed in (1, 2):
        ours.send(seed)
        group.wait(group.broadcast(values(seed, own)))
        assert ours.poll(TIMEOUT_S), "the receiver did not answer"
        assert ours.recv() is True
    ours.send(None)
    process.join(TIMEOUT_S)
    assert process.exitcode == 0
    group.close()
