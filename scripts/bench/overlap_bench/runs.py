"""Makes the runs of the overlap benchmark, and reads what they took."""

from __future__ import annotations

import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
RUN_TIMEOUT_S = 3600
WARM_STEPS = 3  # these do not count
LEAST_STEPS = WARM_STEPS + 2  # the last does not count either
QUIET = (
    *("checkpointing.enabled=false", "checkpointing.export_final_hf=false", "logger.wandb.mode=disabled"),
    *("logger.console=plain", "logger.report=false"),
)
SLOW_TOOLS = "scripts.bench.overlap_bench.slow_tools:SlowTools"


@dataclass(frozen=True, slots=True, kw_only=True)
class Latency:
    """Log-normal latencies of the environment's answers, by seed."""

    seed: int
    median_s: float
    sigma: float

    def overrides(self, samples_per_call: int) -> list[str]:
        """Return the arguments that put such an environment in the place of the demo's in training."""
        arguments = f"seed: {self.seed}, median_s: {self.median_s}, sigma: {self.sigma}"
        return [
            "+env@env.tools=custom",
            f"env.tools.options.target={SLOW_TOOLS}",
            f"env.tools.options.arguments={{{arguments}}}",
            f"env.tools.batch_size={samples_per_call}",
            "env.tools.max_concurrency=1024",
            "env.tools.timeout_s=120",
            "env.tools.check_at_start=false",
            "data.train.env=tools",
        ]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What the driver measured of a step, in seconds."""

    generation_s: float
    overlappable_s: float  # scoring and training
    rest_s: float  # everything else


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRun:
    """What a run left, of the steps that count."""

    path: Path
    step_s: float  # wall time
    steps: tuple[StepTimes, ...]
    records: tuple[Mapping[str, Any], ...]
    accuracies: list[tuple[int, float]]  # of validations, by step

    @property
    def accuracy(self) -> float:
        """That of the last validation."""
        return self.accuracies[-1][1]

    def mean_stages_s(self) -> dict[str, float]:
        """Return the mean seconds of each stage."""
        prefix = "timing/train/"
        names = [name for name in self.records[0] if name.startswith(prefix)]
        return {name.removeprefix(prefix): self._mean(name) for name in names}

    def as_json(self) -> dict[str, Any]:
        """Return seconds per step, idle shares and accuracy."""
        return {
            "num_steps": len(self.records),
            "step_s": self.step_s,
            "engine_idle_share": self._engine_idle_share(),
            "trainer_idle_share": self._trainer_idle_share(),
            "staleness": self._measured("staleness"),
            "accuracy": self.accuracy,
        }

    def _engine_idle_share(self) -> float:
        measured = self._measured("engine_idle_share")
        return 1.0 - self._mean("performance/generation_s") / self.step_s if measured is None else measured

    def _trainer_idle_share(self) -> float:
        measured = self._measured("trainer_idle_share")
        return (
            1.0 - self._mean("performance/worker_compute_s") / self.step_s if measured is None else measured
        )

    def _measured(self, name: str) -> float | None:
        """Return the mean of a metric with this last name, where the run has one."""
        values = [
            value
            for record in self.records
            for key, value in record.items()
            if key.rpartition("/")[2] == name
        ]
        return statistics.fmean(values) if values else None

    def _mean(self, name: str) -> float:
        return statistics.fmean(record[name] for record in self.records)


def mode_overrides(mode: str) -> list[str]:
    """Return the arguments for ``synchronous``, ``exact``, or ``k=N``: rollouts N versions ahead."""
    if mode == "synchronous":
        return []
    return (
        ["grpo.overlap=exact"] if mode == "exact" else [f"grpo.max_staleness={int(mode.removeprefix('k='))}"]
    )


def mean_slowest(num_samples: int, sigma: float, num_draws: int = 400) -> float:
    """Return the mean of the slowest of so many log-normal latencies of median 1."""
    draw = random.Random(0)
    return statistics.fmean(
        math.exp(sigma * max(draw.gauss(0.0, 1.0) for _ in range(num_samples))) for _ in range(num_draws)
    )


def ideal_s(mode: str, steps: Sequence[StepTimes]) -> float:
    """Return the seconds that a step takes at best, by the stages of the synchronous run.

    With exact overlap: the longer of generation and the work that may overlap with it, plus the rest. With
    rollouts k versions ahead, k + 1 steps share the time from one's prompts to its new weights, and none is
    shorter than scoring, training and the rest.
    """
    if mode == "exact":
        return statistics.fmean(max(one.generation_s, one.overlappable_s) + one.rest_s for one in steps)
    staleness = 0 if mode == "synchronous" else int(mode.removeprefix("k="))
    whole_s = statistics.fmean(one.generation_s + one.overlappable_s + one.rest_s for one in steps)
    trainer_s = statistics.fmean(one.overlappable_s + one.rest_s for one in steps)
    return max(whole_s / (staleness + 1), trainer_s)


def make_run(
    config: str, directory: Path, name: str, latency: Latency | None, overrides: Sequence[str]
) -> BenchRun:
    """Make a run in ``directory`` and read it; without a latency the demo's own environment judges.

    Raises RuntimeError with the end of its output when it fails.
    """
    samples_per_call = 8  # those of a prompt: a call ends with its slowest
    slow = [] if latency is None else latency.overrides(samples_per_call)
    path = directory / name.replace("=", "-")
    places = [f"logger.log_dir={directory}", f"logger.run_name={path.name}"]
    finished = subprocess.run(
        [sys.executable, "run_grpo.py", "--config", config, *QUIET, *slow, *places, *overrides],
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=RUN_TIMEOUT_S,
    )
    if finished.returncode:
        raise RuntimeError(f"the run {name} ended with {finished.returncode}:\n{finished.stdout[-4000:]}")
    return read_bench_run(path)


def read_bench_run(path: Path) -> BenchRun:
    """Read a run's metrics and when its steps were complete."""
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    records = [record for record in lines if "timing/train/total_step_time" in record]
    if len(records) < LEAST_STEPS:
        raise ValueError(f"{path} has {len(records)} steps; {LEAST_STEPS} are the least that can be read")
    events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
    ends_s = [datetime.fromisoformat(one["time"]).timestamp() for one in events if one["kind"] == "step"]
    ends_s = ends_s[-len(records) :]
    key = "validation/accuracy"
    # The last step's event comes after its validation.
    num_counted = len(records) - 1 - WARM_STEPS
    return BenchRun(
        path=path,
        step_s=(ends_s[-2] - ends_s[WARM_STEPS - 1]) / num_counted,
        steps=tuple(map(_step_times, records[WARM_STEPS:-1])),
        records=tuple(records[WARM_STEPS:-1]),
        accuracies=[(record["step"], record[key]) for record in lines if key in record],
    )


def rewritten(journal: Path, directory: Path) -> tuple[int, float]:
    """Return how many lines a file of a journal has, and the seconds that it takes to make and append each of
    them by itself; a run appends many at once, and in several processes."""
    lines = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]
    again = directory / journal.name
    began_s = time.perf_counter()
    for line in lines:
        with again.open("a") as file:
            file.write(json.dumps(line) + "\n")
    return len(lines), time.perf_counter() - began_s


def _step_times(record: Mapping[str, float]) -> StepTimes:
    def seconds(name: str) -> float:
        return record.get(f"timing/train/{name}", 0.0)

    work_s = seconds("logprobs") + seconds("policy_training")
    return StepTimes(
        generation_s=seconds("generation"),
        overlappable_s=work_s,
        rest_s=seconds("total_step_time") - seconds("generation") - work_s,
    )
