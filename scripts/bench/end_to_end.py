#!/usr/bin/env python
"""Time of a GRPO step: this framework against a plain single-process PyTorch loop, in one run.

    python scripts/bench/end_to_end.py [--config FILE] [--rounds 5] [key=value ...]

Both do the same work per step (prompts, samples, updates), in turn: a few steps of one while the other
is idle, then the other way round. The plain loop uses 2 threads, Hugging Face generation with a KV
cache, and torch's AdamW. Prints JSON: medians in seconds, their ratio, and where our step's time goes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nemo_like.configuration import Config, load_config
from nemo_like.driver.sync_grpo import SyncGRPODriver
from nemo_like.rules.rules import validate
from scripts.bench.arguments import at_least
from scripts.bench.our_driver import started_driver

NUM_THREADS = 2


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default="configs/grpo_arithmetic_cpu.yaml")
    parser.add_argument("--rounds", type=at_least(1), default=5, help="turns of each side (default 5)")
    parser.add_argument(
        "--steps", type=at_least(2), default=4, help="steps per turn; the first is not counted"
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    cfg = load_config(options.config, [*options.overrides, "logger.wandb.mode=disabled"])
    validate(cfg)
    with tempfile.TemporaryDirectory() as directory:
        result = measure(cfg, Path(directory), options.rounds, options.steps)
    print(json.dumps(result, indent=2))
    return 0


def measure(cfg: Config, directory: Path, num_rounds: int, steps_per_turn: int) -> dict[str, object]:
    """Alternate turns of both sides, each turn's first step left out as warm-up."""
    ours: list[dict[str, float]] = []
    plain: list[dict[str, float]] = []
    with started_driver(cfg, directory) as driver:
        # Loaded only now: the framework's driver must not profit from, or suffer for, torch in its process
        # while it starts.
        os.environ["OMP_NUM_THREADS"] = str(NUM_THREADS)
        from scripts.bench.plain_loop import PlainLoop

        loop = PlainLoop(cfg, NUM_THREADS)
        for turn in range(num_rounds):
            ours += _our_steps(driver, 1 + turn * steps_per_turn, steps_per_turn)[1:]
            plain += [loop.step().as_metrics() for _ in range(steps_per_turn)][1:]
    return _summary(ours, plain)


def _our_steps(driver: SyncGRPODriver, first: int, count: int) -> list[dict[str, float]]:
    return [driver.step(step).metrics for step in range(first, first + count)]


def _summary(ours: list[dict[str, float]], plain: list[dict[str, float]]) -> dict[str, object]:
    def median(records: list[dict[str, float]], key: str) -> float:
        return round(statistics.median(record[key] for record in records), 4)

    our_step_s = median(ours, "timing/train/total_step_time")
    plain_step_s = median(plain, "step_s")
    stages = ("weight_sync", "generation", "advantage", "logprobs", "policy_training")
    return {
        "step_s": our_step_s,
        "plain_step_s": plain_step_s,
        "ratio": round(our_step_s / plain_step_s, 3),
        "num_steps_each": len(ours),
        "stages_s": {stage: median(ours, f"timing/train/{stage}") for stage in stages},
        "generation_s": median(ours, "performance/generation_s"),
        "worker_compute_s": median(ours, "performance/worker_compute_s"),
        "overhead_share": median(ours, "performance/overhead_share"),
        "plain_generation_s": median(plain, "generation_s"),
        "plain_training_s": median(plain, "training_s"),
        "reward": [median(ours, "train/reward"), median(plain, "reward")],
    }


if __name__ == "__main__":
    sys.exit(main())
