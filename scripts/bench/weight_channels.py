#!/usr/bin/env python
"""Time to get weights from one process to engines on the same node: shared memory against a broadcast.

    python scripts/bench/weight_channels.py [--mib 64] [--receivers 2] [--rounds 9]

Each receiver copies every tensor once, as a model that loads them does. Both channels in turn, in one
run. Prints JSON: medians in seconds and their ratio.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nemo_like.weight_transport.bucket_stream import BucketReceiver, BucketSender
from nemo_like.weight_transport.buckets import TensorSpec
from nemo_like.weight_transport.connections import Endpoint, Receivers, SenderConnection, Transfer
from nemo_like.weight_transport.process_groups import (
    BroadcastIncomingBuckets,
    BroadcastOutgoingBuckets,
    GroupAddress,
    NamedProcessGroup,
    Rendezvous,
)
from nemo_like.weight_transport.shared_memory import MemoryReceiver, MemorySender

TIMEOUT_S = 60.0
BUCKET_BYTES = 64 << 20
CPU = torch.device("cpu")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=64, help="size of the weights (default 64)")
    parser.add_argument("--receivers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    tensors = [TensorSpec(f"layer.{index}", "float32", (512, 512)) for index in range(options.mib)]
    print(json.dumps(measure(tensors, options.receivers, options.rounds), indent=2))
    return 0


def measure(tensors: list[TensorSpec], num_receivers: int, num_rounds: int) -> dict[str, object]:
    listening = [Receivers("memory", num_receivers, TIMEOUT_S), Receivers("group", num_receivers, TIMEOUT_S)]
    endpoints = [receivers.endpoint for receivers in listening]
    rendezvous = Rendezvous("127.0.0.1", TIMEOUT_S)
    address = GroupAddress("group", rendezvous.host, rendezvous.port, 1 + num_receivers, TIMEOUT_S)
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(num_receivers)]
    processes = [
        context.Process(
            target=receive, args=(endpoints, address, tensors, rank, num_rounds, theirs), daemon=True
        )
        for rank, (_, theirs) in enumerate(pipes, start=1)
    ]
    for process in processes:
        process.start()
    memory = MemorySender(listening[0], tensors)
    listening[1].open()
    group = NamedProcessGroup(address, rank=0, device=CPU, rendezvous=rendezvous)
    broadcast = BucketSender(listening[1], BroadcastOutgoingBuckets(group, BUCKET_BYTES))
    weights = [(spec.name, torch.randn(spec.shape)) for spec in tensors]
    seconds: dict[str, list[float]] = {"shared_memory": [], "broadcast": []}
    for number in range(1, num_rounds + 1):
        with _Timed(seconds["shared_memory"], pipes):
            memory.offer(Transfer(number, number), weights)
        with _Timed(seconds["broadcast"], pipes):
            broadcast.send(Transfer(number, number), weights)
    for process in processes:
        process.join(TIMEOUT_S)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "num_bytes": sum(spec.num_bytes for spec in tensors),
        "num_receivers": num_receivers,
        **{f"{name}_s": round(median, 5) for name, median in medians.items()},
        "ratio": round(medians["broadcast"] / medians["shared_memory"], 2),
    }


class _Timed:
    """Appends the seconds from the block's start until every receiver has its copies."""

    def __init__(self, seconds: list[float], pipes: list[tuple[Connection, Connection]]) -> None:
        self._seconds, self._pipes = seconds, pipes

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        for ours, _ in self._pipes:
            if not ours.poll(TIMEOUT_S):
                raise TimeoutError(f"a receiver did not finish within {TIMEOUT_S:g} s")
            ours.recv()
        self._seconds.append(time.perf_counter() - self._started)


def receive(
    endpoints: list[Endpoint],
    address: GroupAddress,
    tensors: list[TensorSpec],
    rank: int,
    num_rounds: int,
    done: Connection,
) -> None:
    """One engine's part: every round once from either channel."""
    torch.set_num_threads(1)
    memory = MemoryReceiver(endpoints[0])
    connection = SenderConnection(endpoints[1])
    group = NamedProcessGroup(address, rank=rank, device=CPU)
    broadcast = BucketReceiver(connection, BroadcastIncomingBuckets(group, BUCKET_BYTES), CPU)
    model = {spec.name: torch.zeros(spec.shape) for spec in tensors}

    def load(received: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in received:
            model[name].copy_(tensor)
        done.send(None)

    for number in range(1, num_rounds + 1):
        memory.fetch(Transfer(number, number))
        load(memory.tensors())
        received = broadcast.receive(Transfer(number, number))
        load(tensor for tensors in received for tensor in tensors)


if __name__ == "__main__":
    sys.exit(main())
