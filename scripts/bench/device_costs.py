#!/usr/bin/env python
"""What a policy worker's phases cost beside computing: moves of memory, waits for the device, checkpoints.

    python scripts/bench/device_costs.py [--device cuda] [--size 1.7B] [--parts head,...] [--output FILE]

One Megatron-core worker with random weights, in bfloat16 on a GPU and in float32 on a CPU. The parts:

    start        seconds and peak memory until the worker is ready to train
    phases       seconds of log-probs and training, and their share of the device's peak FLOP/s
    waits        device-to-host synchronisations of a log-prob pass, by place in the code, and per layer
    optimizer    seconds and GB/s of the optimizer's state to the host and back, by Megatron-core and parked
    reference    seconds to put the reference's weights in place and back, by placement
    checkpoint   seconds to save and to load, bytes, and by how much the host's memory grew at most
    head         seconds and peak memory of log-probs with a backward pass, by size of a chunk of logits
    host_memory  how much of the host's memory 5 GiB of pinned tensors take

Prints JSON after each part, so that one that fails leaves those before it.
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
import torch.distributed as dist

from nemo_like.algorithms.logprobs import LogprobSettings, VocabularyShard, linear_scores
from nemo_like.batch.columns import GENERATION_LOGPROBS, PREV_LOGPROBS
from nemo_like.batch.sharding import shard_for_logprobs, shard_for_training
from nemo_like.batch.tags import ADVANTAGE, SAMPLE_MASK
from nemo_like.checkpoint.options import CheckpointWriting
from nemo_like.configuration import Config, load_config
from nemo_like.policy.backends.kept_weights import KeptWeights
from nemo_like.policy.backends.parking import HostMemory
from nemo_like.policy.batch.policy_batch import PolicyBatch
from nemo_like.policy.groups.parallelism import logprob_strategy, parallel_layout, train_strategy
from nemo_like.policy.loss.objective import PolicyObjective
from nemo_like.policy.megatron.backend import MegatronBackend
from nemo_like.policy.megatron.optimizer import tensors_beside_model
from nemo_like.policy.options import ReferencePlacement
from nemo_like.policy.workers.checkpoint_writer import CheckpointWriter
from scripts.bench.arguments import at_least
from scripts.bench.random_inputs import random_samples
from scripts.gpu_check_parts.random_model import SHAPES, write_config, write_weights

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
MIB = 2**20
# Dense bfloat16 products of an H100 or H200, FLOP/s.
PEAK_FLOPS = 989e12


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--size", choices=list(SHAPES), default="tiny")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--samples", type=at_least(1), default=64)
    parser.add_argument("--tokens", type=int, default=512, help="of each sample")
    parser.add_argument("--rounds", type=at_least(1), default=3)
    parser.add_argument("--output", type=Path, help="a file that gets the JSON too")
    options = parser.parse_args()
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as directory:
        bench = Bench(options, Path(directory))
        for part in options.parts.split(","):
            started = time.perf_counter()
            try:
                found[part] = PARTS[part](bench)
            except Exception:
                found[part] = {"error": traceback.format_exc()}
            found[part]["seconds_in_all"] = time.perf_counter() - started
            print(json.dumps({part: found[part]}), flush=True)
            if options.output:
                options.output.write_text(json.dumps(found, indent=2) + "\n")
    return int(any("error" in part for part in found.values()))


class MeasuredBackend(MegatronBackend):
    """A backend whose parts can be measured one by one."""

    @property
    def num_parameters(self) -> int:
        return sum(one.numel() for one in self._all_parameters())

    def parameters(self) -> list[torch.Tensor]:
        return self._all_parameters()

    def weights_in_use(self) -> AbstractContextManager[None]:
        return self._weights_in_use()

    @contextmanager
    def optimizer_stays(self) -> Iterator[None]:
        """Have the optimizer's state stay on the device within the block."""
        with self._optimizer_on_device():
            cfg = self._training
            moves, cfg.offload_optimizer_for_logprob = cfg.offload_optimizer_for_logprob, False
            try:
                yield
            finally:
                cfg.offload_optimizer_for_logprob = moves

    def optimizer_state(self) -> AbstractContextManager[None] | None:
        """Return a context that has the optimizer's state on the device; None where it never leaves."""
        return None if self._parking is None else self._parking.in_use()

    def optimizer_bytes(self) -> int:
        """Return the size of the optimizer's state, which must be on the device."""
        return sum(one.nbytes for one in tensors_beside_model(self._optimizer, self._all_parameters()))

    def move_by_megatron(self, *, to_host: bool) -> None:
        """Move the optimizer's state as Megatron-core does; it must be on the device, or have left so."""
        (self._optimizer.offload_to_cpu if to_host else self._optimizer.restore_from_cpu)()

    def park_again(self) -> None:
        """Park the optimizer's state anew, after its tensors were replaced."""
        self._parking = None
        self._park_optimizer()


class Bench:
    """One worker, made when the first part asks for it, and a batch for it."""

    def __init__(self, options: argparse.Namespace, directory: Path) -> None:
        self.options, self.directory = options, directory
        self.device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
        self.start: dict[str, Any] = {}
        self.stack = ExitStack()  # of what later parts need too
        self._worker: MeasuredBackend | None = None

    @property
    def worker(self) -> MeasuredBackend:
        if self._worker is None:
            self._worker = self._made()
        return self._worker

    def _made(self) -> MeasuredBackend:
        model = self.directory / "model"
        write_config(model, self.options.size)
        started = time.perf_counter()
        write_weights(model, self.options.device)
        if self.options.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        made = time.perf_counter()
        self.cfg = self._configuration(model)
        kind = "nccl" if self.options.device == "cuda" else "gloo"
        dist.init_process_group(kind, init_method=f"file://{self.directory}/store", rank=0, world_size=1)
        objective = PolicyObjective(self.cfg.loss_fn, 1.0)
        worker = MeasuredBackend(self.cfg.policy, objective, parallel_layout(self.cfg.policy).coordinates(0))
        self.start = {
            "model_is_written_s": made - started,
            "worker_starts_s": time.perf_counter() - made,
            "parameters": worker.num_parameters,
            **self._memory(),
        }
        lengths = [self.options.tokens] * self.options.samples
        self.meta, self.columns = random_samples(model, lengths, self.options.tokens // 8, 8)
        return worker

    def _configuration(self, model: Path) -> Config:
        on_gpu = self.options.device == "cuda"
        settings = {
            "policy.model_name": model,
            "policy.device": self.options.device,
            "policy.precision": "bfloat16" if on_gpu else "float32",
            "policy.data_parallel_size": 1,
            "policy.max_total_sequence_length": self.options.tokens,
            "policy.train_global_batch_size": self.options.samples,
            "policy.sequence_packing.enabled": "true",
            "policy.sequence_packing.share_prompts": "false",
            "policy.sequence_packing.train_mb_tokens": 8192,
            "policy.sequence_packing.logprob_mb_tokens": 16384,
            "policy.offload_optimizer_for_logprob": "true" if on_gpu else "false",
            "loss_fn.use_generation_logprobs_as_prev": "false",
            "generation.max_new_tokens": self.options.tokens // 2,
        }
        name = "grpo_arithmetic_gpu.yaml" if on_gpu else "grpo_arithmetic_cpu.yaml"
        return load_config(ROOT / "configs" / name, [f"{key}={value}" for key, value in settings.items()])

    def batch(self, **columns: Any) -> PolicyBatch:
        values = {tag.name: list(self.meta.tag(tag)) for tag in (ADVANTAGE, SAMPLE_MASK)}
        return PolicyBatch({**self.columns, **columns}, self.meta.lengths, values, self.device)

    def schedule(self, phase: str) -> Any:
        shard, strategy = {
            "logprobs": (shard_for_logprobs, logprob_strategy),
            "train": (shard_for_training, train_strategy),
        }[phase]
        [meta] = shard(
            self.meta,
            num_shards=1,
            global_batch_size=len(self.meta),
            strategy=strategy(self.cfg.policy),
        )
        return meta.schedule

    def logprobs(self) -> torch.Tensor:
        return self.worker.logprobs(self.batch(), self.schedule("logprobs"))

    def train(self, prev: torch.Tensor) -> dict[str, Any]:
        columns = (PREV_LOGPROBS, GENERATION_LOGPROBS)
        batch = self.batch(**{column.name: prev.numpy() for column in columns})
        return self.worker.train(batch, self.schedule("train"))

    def seconds(self, function: Callable[[], Any]) -> float:
        self.wait()
        started = time.perf_counter()
        function()
        self.wait()
        return time.perf_counter() - started

    def wait(self) -> None:
        if self.options.device == "cuda":
            torch.cuda.synchronize()

    def _memory(self) -> dict[str, float]:
        if self.options.device == "cpu":
            return {}
        return {
            "peak_gib": torch.cuda.max_memory_allocated() / GIB,
            "now_gib": torch.cuda.memory_allocated() / GIB,
        }

    @contextmanager
    def peak(self, into: dict[str, Any]) -> Iterator[None]:
        """Write the block's peak of the device's memory into ``into``."""
        if self.options.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        yield
        into |= self._memory()


def start(bench: Bench) -> dict[str, Any]:
    _ = bench.worker
    return dict(bench.start)


def phases(bench: Bench) -> dict[str, Any]:
    prev = bench.logprobs()
    first = bench.seconds(lambda: bench.train(prev))
    found: dict[str, Any] = {"first_train_s": first}
    logprob_memory: dict[str, Any] = {}
    train_memory: dict[str, Any] = {}
    scoring, training = [], []
    for _ in range(bench.options.rounds):
        with bench.peak(logprob_memory):
            scoring.append(bench.seconds(bench.logprobs))
        with bench.peak(train_memory), bench.worker.optimizer_stays():
            training.append(bench.seconds(lambda: bench.train(prev)))
    num_tokens, num_parameters = sum(bench.meta.lengths), bench.start["parameters"]
    for name, seconds, factor in (("logprobs", scoring, 2), ("train", training, 6)):
        median = statistics.median(seconds)
        found[name] = {
            "seconds": seconds,
            "tokens_per_s": num_tokens / median,
            "share_of_peak": factor * num_parameters * num_tokens / median / PEAK_FLOPS,
        }
    return found | {"logprob_memory": logprob_memory, "train_memory": train_memory}


def waits(bench: Bench) -> dict[str, Any]:
    if bench.options.device == "cpu":
        bench.logprobs()
        return {"skipped": "a CPU has nothing to wait for"}
    prev = bench.logprobs()
    found = {}
    for name, call in (("logprobs", bench.logprobs), ("train", lambda: bench.train(prev))):
        places: collections.Counter[str] = collections.Counter()

        def note(
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
            seen: collections.Counter[str] = places,
        ) -> None:
            if "synchroniz" in str(message):
                seen[f"{'/'.join(Path(filename).parts[-3:])}:{lineno}"] += 1

        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = note
            torch.cuda.set_sync_debug_mode("warn")
            try:
                call()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        schedule = bench.schedule(name)
        num_micro_batches = sum(len(update.micro_batches) for update in schedule.global_batches)
        layers = SHAPES[bench.options.size]["num_hidden_layers"]
        found[name] = {
            "waits": sum(places.values()),
            "micro_batches": num_micro_batches,
            "per_layer": sum(places.values()) / num_micro_batches / layers,
            "places": dict(places.most_common(12)),
        }
    return found


def optimizer(bench: Bench) -> dict[str, Any]:
    """Megatron-core's own way, which copies tensor by tensor to memory that is not pinned, beside parking."""
    worker = bench.worker
    seconds: dict[str, list[float]] = collections.defaultdict(list)
    size = 0
    for _ in range(bench.options.rounds):
        state = worker.optimizer_state()
        if state is None:
            return {"skipped": "this optimizer's state stays where it is"}
        with ExitStack() as stack:
            seconds["back"].append(bench.seconds(partial(stack.enter_context, state)))
            size = worker.optimizer_bytes()
            seconds["there"].append(bench.seconds(stack.close))
        with state_of(worker):
            seconds["megatron_there"].append(bench.seconds(partial(worker.move_by_megatron, to_host=True)))
            seconds["megatron_back"].append(bench.seconds(partial(worker.move_by_megatron, to_host=False)))
            worker.park_again()
    return {
        "gib": size / GIB,
        "parked": _moves(seconds["there"], seconds["back"], size),
        "megatron": _moves(seconds["megatron_there"], seconds["megatron_back"], size),
    }


def state_of(worker: MeasuredBackend) -> AbstractContextManager[None]:
    """Return a context that has the optimizer's state on the device."""
    return worker.optimizer_state() or nullcontext()


def _moves(there: list[float], back: list[float], size: int) -> dict[str, Any]:
    return {
        "to_host_s": there,
        "to_device_s": back,
        "to_host_gb_per_s": size / statistics.median(there) / 1e9,
        "to_device_gb_per_s": size / statistics.median(back) / 1e9,
    }


def reference(bench: Bench) -> dict[str, Any]:
    found: dict[str, Any] = {}
    bench.stack.enter_context(bench.worker.weights_in_use())
    for placement in ReferencePlacement:
        kept = KeptWeights(bench.worker.parameters, placement)
        seconds = []
        for _ in range(bench.options.rounds):
            bench.wait()
            started = time.perf_counter()
            with kept.in_model():
                pass
            bench.wait()
            seconds.append(time.perf_counter() - started)
        found[placement.value] = {"seconds": seconds}
    return found


def checkpoint(bench: Bench) -> dict[str, Any]:
    worker, found = bench.worker, {}
    bench.train(bench.logprobs())
    for writing in CheckpointWriting:
        path = bench.directory / f"checkpoint-{writing.value}"
        path.mkdir()
        writer = CheckpointWriter(dist.group.WORLD, writing)
        with _host_growth() as growth:
            started = time.perf_counter()
            worker.save_checkpoint(path, writer)
            returned = time.perf_counter() - started
            writer.complete(path)
            writer.wait(300.0)
            done = time.perf_counter() - started
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        found[writing.value] = {
            "returned_s": returned,
            "written_s": done,
            "gib": size / GIB,
            "host_grew_by_gib": growth[0],
        }
    with _host_growth() as growth:
        loading = bench.seconds(lambda: worker.load_checkpoint(path))
    return found | {"load_s": loading, "load_host_grew_by_gib": growth[0]}


@contextmanager
def _host_growth() -> Iterator[list[float]]:
    """Give by how many GiB the memory of this process on the host grew at most within the block."""
    growth = [0.0]
    Path("/proc/self/clear_refs").write_text("5")  # begins to look for the peak anew
    before = _status("VmRSS")
    yield growth
    growth[0] = (_status("VmHWM") - before) / GIB


def _status(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def head(bench: Bench) -> dict[str, Any]:
    shape = SHAPES[bench.options.size]
    dtype = torch.bfloat16 if bench.options.device == "cuda" else torch.float32
    rows = 8192 if bench.options.device == "cuda" else 256
    torch.manual_seed(0)
    hidden = torch.randn(rows, shape["hidden_size"], device=bench.device, dtype=dtype, requires_grad=True)
    weight = torch.randn(
        shape["vocab_size"], shape["hidden_size"], device=bench.device, dtype=dtype, requires_grad=True
    )
    ids = torch.randint(0, shape["vocab_size"], (rows,), device=bench.device)
    shard = VocabularyShard(first=0, num_valid=shape["vocab_size"], group=None)
    found: dict[str, Any] = {}
    for mib in (128, 256, 512, 1024, 2048, 4096):
        settings = LogprobSettings(temperature=1.0, max_chunk_bytes=mib * MIB)

        def step(settings: LogprobSettings = settings) -> None:
            hidden.grad = weight.grad = None
            linear_scores(hidden, weight, ids, shard, settings).logprobs.sum().backward()

        step()
        memory: dict[str, Any] = {}
        with bench.peak(memory):
            seconds = [bench.seconds(step) for _ in range(bench.options.rounds)]
        found[f"{mib} MiB"] = {"seconds": min(seconds), **memory}
    return found


def host_memory(bench: Bench) -> dict[str, Any]:
    size = 5 * GIB if bench.options.device == "cuda" else 5 * MIB
    pinned = bench.options.device == "cuda"
    found: dict[str, Any] = {"asked_gib": size / GIB}
    for name, take in {
        "torch": lambda: torch.empty(size, dtype=torch.uint8, pin_memory=pinned),
        "as_it_is": lambda: HostMemory([size], is_pinned=pinned),
    }.items():
        with _host_growth() as growth:
            started = time.perf_counter()
            held = take()
            seconds = time.perf_counter() - started
        found[name] = {"took_gib": growth[0], "seconds": seconds}
        del held
    return found


PARTS: dict[str, Callable[[Bench], dict[str, Any]]] = {
    "start": start,
    "phases": phases,
    "waits": waits,
    "optimizer": optimizer,
    "reference": reference,
    "checkpoint": checkpoint,
    "head": head,
    "host_memory": host_memory,
}


if __name__ == "__main__":
    sys.exit(main())
