#!/usr/bin/env python
"""Whether a long run holds on to anything: memory and descriptors of each of its processes, as steps go by.

    python scripts/bench/long_run.py [--config FILE] [--steps 300] [--every 25] [key=value ...]

A minimal job: few samples a step, so that many steps take minutes; a checkpoint and a validation at every
second look, with all that they leave behind. Prints JSON: for each process the memory that it has allocated
(MiB, swapped out or not; pages of files do not count, which the kernel drops as it likes) and its number of
file descriptors at each look, the objects in Ray's store (MiB), and files; and the growth of each over the
steps of the run, from the slope of the last two thirds of the looks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import psutil
import ray

from nemo_like.configuration import Config, load_config
from nemo_like.driver.setup import started
from nemo_like.driver.stopping import StopRequests
from nemo_like.driver.whole_run import run_checkpoints
from nemo_like.observability.logger import RunLogger
from nemo_like.observability.run_directory import RunDirectory
from nemo_like.rules.rules import validate

MIB = 2**20
SMALL = [
    *("grpo.num_prompts_per_step=8", "grpo.num_generations_per_prompt=4", "grpo.max_val_samples=32"),
    *("policy.train_global_batch_size=32", "policy.train_micro_batch_size=16", "generation.num_engines=1"),
    *("policy.scheduler.decay_style=constant", "policy.optimizer.lr=1e-5", "grpo.val_at_start=false"),
    "loss_fn.use_generation_logprobs_as_prev=false",  # every stage is there
]


@dataclass(frozen=True)
class Look:
    """What there is after a step."""

    step: int
    allocated_mib: dict[str, float]  # by process
    num_fds: dict[str, int]
    object_store_mib: float
    num_references: int  # Ray objects that the driver knows
    num_shared_files: int  # in /dev/shm
    num_run_files: int


class LookingLogger(RunLogger):
    """Looks around when a step is logged."""

    def __init__(self, every: int, directory: RunDirectory, **kwargs: Any) -> None:
        super().__init__(directory=directory, **kwargs)
        self._every, self._directory = every, directory
        self.looks: list[Look] = []

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        super().log_step(step, metrics)
        if step % self._every == 0:
            self.looks.append(look(step, self._directory))
            print(f"step {step}", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/grpo_arithmetic_cpu.yaml")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=25, help="steps between two looks")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    if options.steps < 2 * options.every:
        parser.error(f"--steps {options.steps} is too few for two looks; the least is {2 * options.every}")
    often = [f"grpo.max_num_steps={options.steps}", f"grpo.val_period={2 * options.every}"]
    often += [f"checkpointing.save_period={2 * options.every}"]
    cfg = load_config(options.config, [*SMALL, *often, *options.overrides])
    validate(cfg)
    with tempfile.TemporaryDirectory() as directory:
        looks = run(cfg, RunDirectory.create(directory, "bench"), options.every)
    print(json.dumps(summary(looks, options.steps), indent=2))
    return 0


def run(cfg: Config, directory: RunDirectory, every: int) -> list[Look]:
    """All steps; what was seen."""
    checkpoints = run_checkpoints(cfg, directory)
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        logger = LookingLogger(
            every,
            directory,
            cfg=cfg.logger,
            resolved_config={},
            max_num_steps=cfg.grpo.max_num_steps,
            stream=nowhere,
        )
        with logger, started(cfg, directory, logger, checkpoints, StopRequests(cfg.checkpointing)) as parts:
            parts.driver.run()
    return logger.looks


def look(step: int, directory: RunDirectory) -> Look:
    actors = {pid: name for name, pid in json.loads((directory.path / "processes.json").read_text()).items()}
    allocated_mib: dict[str, float] = {}
    num_fds: dict[str, int] = {}
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        try:
            name = actors.get(process.pid) or _name(process)
            allocated_mib[name] = round(_allocated_bytes(process) / MIB, 1)
            num_fds[name] = process.num_fds()
        except psutil.NoSuchProcess:
            continue
    resources = "object_store_memory"
    return Look(
        step=step,
        allocated_mib=allocated_mib,
        num_fds=num_fds,
        object_store_mib=round(
            (ray.cluster_resources()[resources] - ray.available_resources()[resources]) / MIB, 2
        ),
        num_references=len(ray._private.worker.global_worker.core_worker.get_all_reference_counts()),
        num_shared_files=len(os.listdir("/dev/shm")),
        num_run_files=sum(len(files) for _, _, files in os.walk(directory.path)),
    )


def _allocated_bytes(process: psutil.Process) -> int:
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text(encoding="utf-8").splitlines()[1:]
    except (FileNotFoundError, ProcessLookupError) as error:
        raise psutil.NoSuchProcess(process.pid) from error
    kib = {name: int(value.split()[0]) for name, _, value in (line.partition(":") for line in lines)}
    return (kib["Anonymous"] + kib["Swap"]) * 1024


def _name(process: psutil.Process) -> str:
    if process.pid == os.getpid():
        return "driver"
    command = process.cmdline() or [process.name()]
    last = os.path.basename(next((part for part in command if part.endswith(".py")), command[0]))
    return f"{last} {process.pid}"


def summary(looks: list[Look], num_steps: int) -> dict[str, Any]:
    """The looks, and what grew: per process seen at each of the last ones."""
    late = looks[len(looks) // 3 :]
    names = set(late[0].allocated_mib).intersection(*(each.allocated_mib for each in late))
    growth = {
        "allocated_mib": {name: growth_of(late, num_steps, "allocated_mib", name) for name in sorted(names)},
        "num_fds": {name: growth_of(late, num_steps, "num_fds", name) for name in sorted(names)},
        **{
            name: growth_of(late, num_steps, name)
            for name in ("object_store_mib", "num_references", "num_shared_files", "num_run_files")
        },
    }
    return {"num_steps": num_steps, "growth": growth, "looks": [asdict(each) for each in looks]}


def growth_of(looks: list[Look], num_steps: int, what: str, process: str | None = None) -> float:
    """Over the whole run, by the slope of the line of least squares."""
    values = [getattr(each, what) for each in looks]
    if process is not None:
        values = [value[process] for value in values]
    slope, _ = statistics.linear_regression([each.step for each in looks], values)
    return round(slope * num_steps, 2)


if __name__ == "__main__":
    sys.exit(main())
