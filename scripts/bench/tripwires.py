#!/usr/bin/env python
"""Whether tripwires stay silent in healthy runs, and what they cost.

    python scripts/bench/tripwires.py clean [--steps 60] [--only NAME ...] [--level cheap]
    python scripts/bench/tripwires.py cost [--steps 40] [--rounds 3]

``clean`` trains five kinds of runs and counts what tripwires say: the demo, packed without shared prompts and
with a reference policy, FSDP, a mixture of experts, and conversations of two turns. It prints a JSON object
for each.

``cost`` makes runs of the demo with debug.tripwires=off and cheap in turn, and prints the seconds of CPU, of
all processes, per step. The first ten steps do not count.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.arguments import at_least

ROOT = Path(__file__).resolve().parents[2]
CONFIG = "configs/grpo_arithmetic_cpu.yaml"
RUN_TIMEOUT_S = 1800
QUIET = (
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "grpo.val_period=0",
    "checkpointing.enabled=false",
    "checkpointing.export_final_hf=false",
    "logger.wandb.mode=disabled",
)
SCORED = "loss_fn.use_generation_logprobs_as_prev=false"
CLEAN: dict[str, tuple[str, ...]] = {
    "demo": (),
    "packing": (
        SCORED,
        "policy.sequence_packing.share_prompts=false",
        "loss_fn.reference_policy_kl_penalty=0.01",
        "loss_fn.entropy_coef=0.001",
    ),
    "fsdp": (SCORED, "policy.backend=fsdp"),
    "moe": (
        SCORED,
        "policy.model_name={experts}",
        "policy.megatron_cfg.expert_model_parallel_size=2",
        "env.arithmetic.kind=regex",
        "env.arithmetic.check_at_start=false",
        "+env.arithmetic.options.pattern='^[0-4]'",
    ),
    "multi_turn": (
        SCORED,
        "policy.max_total_sequence_length=48",
        "env.arithmetic.kind=calculator",
        "env.arithmetic.max_turns=2",
        "env.arithmetic.check_at_start=false",
        "+env.arithmetic.options.call_pattern='^([0-4])'",
        "+env.arithmetic.options.result_template='{result}+'",
        "+env.arithmetic.options.answer_pattern=null",
    ),
}
# Steps before the processes have warmed up.
_SKIPPED_STEPS = 10


def make_experts(directory: Path) -> Path:
    """Save a random mixture of four experts with the demo's tokenizer."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    from scripts.demo_model.tiny_tokenizer import save_tokenizer
    from scripts.demo_model.warm_start import tiny_config

    torch.manual_seed(0)
    dense = tiny_config().to_dict()
    kept = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    more = ("head_dim", "max_position_embeddings", "tie_word_embeddings", "bos_token_id", "eos_token_id")
    config = Qwen3MoeConfig(
        **{name: dense[name] for name in (*kept, *more)},
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=96,
        output_router_logits=False,
    )
    Qwen3MoeForCausalLM(config).float().save_pretrained(directory)
    save_tokenizer(directory)
    return directory


def command(directory: Path, name: str, overrides: Sequence[str]) -> list[str]:
    """Return the command line of a run."""
    return [
        *(sys.executable, "run_grpo.py", "--config", CONFIG),
        *(f"logger.log_dir={directory}", f"logger.run_name={name}", *QUIET, *overrides),
    ]


def clean(steps: int, names: Sequence[str], level: str) -> int:
    """Make the runs, print what each said, and return how many were not silent."""
    num_loud = 0
    with tempfile.TemporaryDirectory() as scratch:
        for name in names:
            directory = Path(scratch)
            overrides = [*CLEAN[name], f"grpo.max_num_steps={steps}", f"debug.tripwires={level}"]
            if name == "moe":
                experts = make_experts(directory / "experts")
                overrides = [
                    override.format(experts=experts) if "{experts}" in override else override
                    for override in overrides
                ]
            finished = subprocess.run(
                command(directory, name, overrides),
                check=False,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=RUN_TIMEOUT_S,
            )
            path = directory / name / "metrics.jsonl"
            records = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
            said = re.findall(r"tripwire '(\w+)'.*", finished.stdout)
            report = {
                "run": name,
                "returncode": finished.returncode,
                "steps": len(records),
                "alarms": said,
                "reward": [round(records[at]["train/reward"], 3) for at in (0, -1)] if records else [],
                "max_token_mult_prob_error": max(
                    (record["train/token_mult_prob_error"] for record in records), default=None
                ),
            }
            print(json.dumps(report), flush=True)
            is_loud = bool(said) or finished.returncode != 0
            num_loud += is_loud
            if is_loud:
                print(finished.stdout[-1500:], file=sys.stderr)
    return num_loud


class CpuClock:
    """Adds up the CPU time of a process and all that descend from it, those that ended included as far as
    they were seen; looked at ten times a second."""

    def __init__(self, pid: int) -> None:
        self._root = psutil.Process(pid)
        self._seen: dict[tuple[int, float], float] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def seconds(self) -> float:
        self._take()
        return sum(self._seen.values())

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(0.1):
            self._take()

    def _take(self) -> None:
        try:
            processes = [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return
        for process in processes:
            try:
                times = process.cpu_times()
                self._seen[process.pid, process.create_time()] = times.user + times.system
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue


def cpu_seconds_per_step(directory: Path, name: str, steps: int, level: str) -> float:
    """Make a run; return its CPU seconds per step between the tenth step and the last."""
    overrides = [
        f"grpo.max_num_steps={steps}",
        f"debug.tripwires={level}",
        "checkpointing.export_final_hf=false",
    ]
    with subprocess.Popen(
        command(directory, name, overrides),
        cwd=ROOT,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        clock = CpuClock(process.pid)
        marks: dict[int, float] = {}
        assert process.stdout is not None
        for line in process.stdout:
            if found := re.match(r"step (\d+)/", line):
                marks[int(found[1])] = clock.seconds()
        clock.stop()
    return (marks[steps] - marks[_SKIPPED_STEPS]) / (steps - _SKIPPED_STEPS)


def cost(steps: int, rounds: int) -> None:
    """Print the CPU seconds per step with and without tripwires, run by run."""
    seconds: dict[str, list[float]] = {"off": [], "cheap": []}
    with tempfile.TemporaryDirectory() as scratch:
        for number in range(rounds):
            for level in ("off", "cheap") if number % 2 == 0 else ("cheap", "off"):
                name = f"{level}-{number}-{int(time.time())}"
                seconds[level].append(cpu_seconds_per_step(Path(scratch), name, steps, level))
                print(
                    json.dumps({"level": level, "cpu_s_per_step": round(seconds[level][-1], 4)}), flush=True
                )
    off, cheap = (statistics.median(seconds[level]) for level in ("off", "cheap"))
    print(json.dumps({"median_off": off, "median_cheap": cheap, "more": f"{cheap / off - 1:+.2%}"}))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    modes = parser.add_subparsers(dest="mode", required=True)
    cleaning = modes.add_parser("clean")
    cleaning.add_argument("--steps", type=at_least(1), default=60)
    cleaning.add_argument("--only", nargs="+", choices=list(CLEAN), default=list(CLEAN))
    cleaning.add_argument("--level", choices=["cheap", "all"], default="all")
    costing = modes.add_parser("cost")
    costing.add_argument("--steps", type=at_least(_SKIPPED_STEPS + 1), default=40)
    costing.add_argument("--rounds", type=at_least(1), default=3)
    options = parser.parse_args()
    if options.mode == "clean":
        return min(1, clean(options.steps, options.only, options.level))
    cost(options.steps, options.rounds)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
