#!/usr/bin/env python
"""Time to get weights from one process to engines on the same node, by every channel that the devices allow.

    python scripts/bench/weight_channels.py [--device cpu] [--mib 64] [--receivers 2] [--rounds 9]

On CPUs these are shared memory and a broadcast over gloo; on GPUs CUDA's inter-process memory between
processes that share the first GPU and, where there is a GPU for each process, a broadcast over NCCL. Each
receiver copies every tensor once, as a model that loads them does. The channels take turns in one run. Prints
JSON: medians in seconds, GB/s into one receiver, and on CPUs the ratio of the two.
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

from nemo_like.generation.interface import WeightGroup
from nemo_like.generation.options import WeightTransport
from nemo_like.generation.weight_channels import open_channel
from nemo_like.policy.options import Device
from nemo_like.weight_sync.channels import MemoryChannel, WeightChannel, broadcast_channel, cuda_channel
from nemo_like.weight_transport.buckets import TensorSpec
from nemo_like.weight_transport.connections import Receivers, Transfer, Word
from scripts.bench.arguments import at_least

TIMEOUT_S = 60.0
BUCKET_BYTES = 64 << 20


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--mib", type=at_least(1), default=64, help="size of the weights (default 64)")
    parser.add_argument("--tensor-mib", type=at_least(1), default=1, help="size of one tensor (default 1)")
    parser.add_argument("--receivers", type=at_least(1), default=2)
    parser.add_argument("--rounds", type=at_least(1), default=9)
    options = parser.parse_args()
    count, shape = options.mib // options.tensor_mib, (512 * options.tensor_mib, 512)
    tensors = [TensorSpec(f"layer.{index}", "float32", shape) for index in range(count)]
    print(json.dumps(measure(Device[options.device], tensors, options.receivers, options.rounds), indent=2))
    return 0


def measure(
    device: Device, tensors: list[TensorSpec], num_receivers: int, num_rounds: int
) -> dict[str, object]:
    channels = _channels(device, tensors, num_receivers)
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(num_receivers)]
    groups = [
        WeightGroup(name, channel.address, 1, BUCKET_BYTES, tuple(tensors))
        for name, channel in channels.items()
    ]
    processes = [
        context.Process(target=receive, args=(groups, device, worker, num_rounds, theirs), daemon=True)
        for worker, (_, theirs) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    for channel in channels.values():
        channel.open()
    own = torch.device("cuda:0" if device is Device.cuda else "cpu")
    weights = [(spec.name, torch.randn(spec.shape, device=own)) for spec in tensors]
    seconds: dict[str, list[float]] = {name: [] for name in channels}
    for number in range(1, num_rounds + 1):
        for name, channel in channels.items():
            with _Timed(seconds[name], pipes):
                channel.offer(Transfer(number, number), iter(weights))
                channel.deliver()
    for process in processes:
        process.join(TIMEOUT_S)
    return _result(seconds, sum(spec.num_bytes for spec in tensors), num_receivers)


def _channels(device: Device, tensors: list[TensorSpec], num_receivers: int) -> dict[str, WeightChannel]:
    def broadcast() -> WeightChannel:
        return broadcast_channel("collective", num_receivers, TIMEOUT_S, "127.0.0.1", device, BUCKET_BYTES)

    if device is Device.cpu:
        memory = Receivers("shared_memory", num_receivers, TIMEOUT_S)
        return {"shared_memory": MemoryChannel(memory, tensors), "collective": broadcast()}
    torch.cuda.set_device(0)
    channels: dict[str, WeightChannel] = {
        "cuda_ipc": cuda_channel("cuda_ipc", num_receivers, TIMEOUT_S, BUCKET_BYTES)
    }
    if torch.cuda.device_count() > num_receivers:
        channels["collective"] = broadcast()
    return channels


def _result(seconds: dict[str, list[float]], num_bytes: int, num_receivers: int) -> dict[str, object]:
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    result: dict[str, object] = {"num_bytes": num_bytes, "num_receivers": num_receivers}
    for name, median in medians.items():
        result[f"{name}_s"] = round(median, 5)
        result[f"{name}_gb_per_s"] = round(num_bytes / median / 1e9, 2)
    if "shared_memory" in medians:
        result["ratio"] = round(medians["collective"] / medians["shared_memory"], 2)
    return result


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
    groups: list[WeightGroup], device: Device, worker: int, num_rounds: int, done: Connection
) -> None:
    """One engine's part: every round once from each channel."""
    torch.set_num_threads(1)
    devices = [_receiving_device(device, group, worker) for group in groups]
    incoming = [open_channel(group, worker, own) for group, own in zip(groups, devices, strict=True)]
    models = [
        {spec.name: torch.zeros(spec.shape, device=own) for spec in group.tensors}
        for group, own in zip(groups, devices, strict=True)
    ]

    def load(received: Iterator[list[tuple[str, torch.Tensor]]], model: dict[str, torch.Tensor]) -> None:
        for part in received:
            for name, tensor in part:
                model[name].copy_(tensor)

    for number in range(1, num_rounds + 1):
        for channel, own, model in zip(incoming, devices, models, strict=True):
            channel.fetch(Transfer(number, number))
            load(channel.receive(), model)
            if device is Device.cuda:
                torch.cuda.synchronize(own)
            channel.end(Transfer(number, number), Word.loaded)
            done.send(None)


def _receiving_device(device: Device, group: WeightGroup, worker: int) -> torch.device:
    """Return the sender's GPU for memory that is mapped, and one of the receiver's own for a broadcast."""
    if device is Device.cpu:
        return torch.device("cpu")
    is_own = group.address.transport is WeightTransport.collective
    return torch.device("cuda", group.first_rank + worker if is_own else 0)


if __name__ == "__main__":
    sys.exit(main())
