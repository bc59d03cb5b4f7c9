#!/usr/bin/env python
"""Which mutations of tests/tripwires are caught by tripwires: small runs with and without each.

    python scripts/bench/mutation_score.py [--jobs 1] [--only NAME ...] [--results FILE]
        [--overrides key=value ...] [--caught-only] [--timeout-s 400]

Runs a small version of the demo once for every set of settings that the mutations ask for, and once for each
mutation. A mutation that needs a continued run is planted in the second part of one. Appends a JSON object
per mutation to the file of results as its run ends, and leaves out mutations that the file has already.
Prints a table: how many processes had the mutation planted, how the run ended, which tripwires said something
at which step, and how many metrics differ. The module in which engines and trainer differ
follows, where the alarms name one. At the end prints a summary of the file as JSON. Tripwires are at
debug.tripwires=all unless the overrides say otherwise.

Uses modules of tests/, and so needs what they need: bash scripts/setup.sh --dev.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from threading import Lock
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nemo_like.observability.jsonl import without_measurements
from scripts.tests_packages import packages_of_the_tests

with packages_of_the_tests():
    from tests.tripwires.mutations import MUTATIONS, Mutation
    from tests.tripwires.planted import ROOT, environment_with

CONFIG = "configs/grpo_arithmetic_cpu.yaml"
# Three steps of four updates on two ranks, in several micro-batches, with a loss of which every term counts.
SMALL = (
    "grpo.max_num_steps=3",
    "grpo.num_prompts_per_step=8",
    "grpo.num_generations_per_prompt=4",
    "grpo.samples_kept_together=1",
    "grpo.val_period=0",
    "grpo.val_at_start=false",
    "grpo.val_at_end=false",
    "loss_fn.use_generation_logprobs_as_prev=false",
    "loss_fn.reference_policy_kl_penalty=0.05",
    "loss_fn.ratio_clip_min=0.02",
    "loss_fn.ratio_clip_max=0.04",
    "policy.train_global_batch_size=8",
    "policy.sequence_packing.share_prompts=false",
    "policy.sequence_packing.train_mb_tokens=32",
    "policy.scheduler.warmup_updates=4",
    "generation.num_engines=1",
    "generation.temperature=2.0",
    "checkpointing.enabled=false",
    "logger.wandb.mode=disabled",
    "debug.tripwires=all",
)
# Continued from a checkpoint after the first of three steps.
RESUMED = ("checkpointing.enabled=true", "checkpointing.export_final_hf=false", "grpo.max_num_steps=3")
_SHOWN = ("train/loss", "train/grad_norm", "train/reward", "train/token_mult_prob_error")


@dataclass(frozen=True)
class Outcome:
    """How a run with a mutation ended, and the metrics that differ from the same run without one."""

    name: str
    num_processes: int  # in which the target was replaced
    returncode: int | None  # None: it was ended at the deadline
    differing: dict[str, list[str]] = field(default_factory=dict)  # by step
    shown: dict[str, list[float | None]] = field(default_factory=dict)  # with the mutation, step by step
    baseline: dict[str, list[float | None]] = field(default_factory=dict)
    error: str = ""
    # At which step which tripwires said something.
    caught: dict[str, list[str]] = field(default_factory=dict)
    where: str = ""  # the module in which engines and trainer differ, where the alarms name one
    group: str = ""

    @property
    def is_caught(self) -> bool:
        return bool(self.caught)


class Scorer:
    """Runs mutations and baselines in directories of their own below ``directory``."""

    def __init__(
        self, directory: Path, overrides: Sequence[str], *, compares: bool, timeout_s: float
    ) -> None:
        """Without ``compares`` no run is made without a mutation, and nothing is said of metrics. A run that
        takes longer than ``timeout_s`` is ended."""
        self._directory, self._overrides, self._compares = directory, tuple(overrides), compares
        self._timeout_s = timeout_s
        self._baselines: dict[tuple[object, ...], list[dict[str, float]]] = {}
        self._locks: dict[tuple[object, ...], Lock] = {}
        self._lock = Lock()

    def score(self, one: Mutation) -> Outcome:
        """Run the mutation, and before it its baseline, unless another mutation needed the same."""
        baseline = self.baseline(one.overrides, one.needs_resume) if self._compares else None
        log = self._directory / f"{one.name}.planted"
        returncode, output, records = self.run(
            one.name, one.overrides, environment_with(one.name, log), one.needs_resume
        )
        error = "" if returncode == 0 else output.strip()[-600:]
        num_processes = len(log.read_text().splitlines()) if log.is_file() else 0
        return Outcome(
            name=one.name,
            num_processes=num_processes,
            returncode=returncode,
            differing={} if baseline is None else differing(baseline, records),
            shown={key: [record.get(key) for record in records] for key in _SHOWN},
            baseline={key: [record.get(key) for record in baseline or ()] for key in _SHOWN},
            error=error,
            caught=caught_by(output),
            where="; ".join(re.findall(r"where engines and trainer differ: (.*); scripts/", output)),
            group=one.group.value,
        )

    def baseline(self, overrides: tuple[str, ...], needs_resume: bool) -> list[dict[str, float]]:
        """Return the metrics of a run with these settings and without a mutation, step by step."""
        key = (overrides, needs_resume)
        with self._lock:
            lock = self._locks.setdefault(key, Lock())
        with lock:
            if key not in self._baselines:
                name = f"baseline-{len(self._locks)}-{id(lock) % 10**6}"
                returncode, output, records = self.run(name, overrides, os.environ, needs_resume)
                if returncode != 0:
                    raise RuntimeError(f"the run without a mutation failed with {overrides}:\n{output}")
                self._baselines[key] = records
            return self._baselines[key]

    def run(
        self, name: str, overrides: Sequence[str], environment: Mapping[str, str], needs_resume: bool
    ) -> tuple[int | None, str, list[dict[str, float]]]:
        """Run the small demo; return exit code, output and metrics. A resumed run begins unmutated."""
        if not needs_resume:
            return self._run(name, overrides, environment)
        self._run(name, [*overrides, *RESUMED, "grpo.max_num_steps=1"], os.environ)
        return self._run(name, [*overrides, *RESUMED], environment)

    def _run(
        self, name: str, overrides: Sequence[str], environment: Mapping[str, str]
    ) -> tuple[int | None, str, list[dict[str, float]]]:
        command = [sys.executable, "run_grpo.py", "--config", CONFIG, f"logger.log_dir={self._directory}"]
        command += [f"logger.run_name={name}", *SMALL, *self._overrides, *overrides]
        temporary = tempfile.mkdtemp(prefix="mut-")
        try:
            finished = subprocess.run(
                command,
                check=False,
                cwd=ROOT,
                env={**environment, "TMPDIR": temporary},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=self._timeout_s,
            )
            returncode, output = finished.returncode, finished.stdout
        except subprocess.TimeoutExpired as error:
            returncode, output = None, str(error.stdout or "")
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        path = self._directory / name / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        return returncode, output, [json.loads(line) for line in lines]


def caught_by(output: str) -> dict[str, list[str]]:
    """Return the tripwires that a run's output names, by step. A run that ends with another error has none:
    it tells nobody what is wrong."""
    found: dict[str, list[str]] = {}
    for step, text in re.findall(r"at step (\d+), (tripwire .*(?:\ntripwire .*)*)", output):
        found.setdefault(step, []).extend(re.findall(r"^tripwire '(\w+)'", text, re.MULTILINE))
    for step, name in re.findall(r"step_(\d+) could not be written: .*tripwire '(\w+)'", output):
        found.setdefault(step, []).append(name)
    return {step: sorted(set(names)) for step, names in found.items()}


def differing(
    ours: Sequence[Mapping[str, float]], others: Sequence[Mapping[str, float]]
) -> dict[str, list[str]]:
    """Return the names of the metrics that are not equal, by step; a step that is missing differs in all."""
    found: dict[str, list[str]] = {}
    for number, record in enumerate(map(without_measurements, ours)):
        other = without_measurements(others[number]) if number < len(others) else {}
        if wrong := sorted(name for name in {*record, *other} if record.get(name) != other.get(name)):
            found[str(number + 1)] = wrong
    return found


def line(outcome: Outcome) -> str:
    """Return an outcome as one line of the table."""
    how = "ok" if outcome.returncode == 0 else f"exit {outcome.returncode}"
    steps = ", ".join(f"step {step}: {len(names)}" for step, names in outcome.differing.items()) or "-"
    caught = "; ".join(f"step {step}: {', '.join(names)}" for step, names in outcome.caught.items())
    mark = "caught" if outcome.is_caught else "MISSED"
    return (
        f"{mark} {outcome.name:34} planted in {outcome.num_processes}, {how}, by {caught or 'nothing'}; "
        f"differing {steps}" + (f"; {outcome.where}" if outcome.where else "")
    )


def summary(outcomes: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return how many mutations were caught, in all and by group, and which were not."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome["group"], []).append(outcome)
    return {
        "mutations": len(outcomes),
        "caught": sum(bool(outcome["caught"]) for outcome in outcomes),
        "missed": [outcome["name"] for outcome in outcomes if not outcome["caught"]],
        "not_planted": [outcome["name"] for outcome in outcomes if not outcome["num_processes"]],
        "groups": {
            name: {"mutations": len(of_group), "caught": sum(bool(one["caught"]) for one in of_group)}
            for name, of_group in groups.items()
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs side by side (default 1)")
    parser.add_argument("--only", nargs="+", choices=list(MUTATIONS), metavar="NAME", default=list(MUTATIONS))
    parser.add_argument("--results", type=Path, default=Path("mutation_score.jsonl"))
    parser.add_argument("--caught-only", action="store_true", help="leave out the runs to compare with")
    parser.add_argument(
        "--timeout-s", type=float, default=400, help="seconds after which a run is ended (default 400)"
    )
    parser.add_argument("--overrides", nargs="*", metavar="key=value", default=[])
    options = parser.parse_args()
    done: set[str] = set()
    if options.results.is_file():
        done = {json.loads(each)["name"] for each in options.results.read_text().splitlines()}
    wanted = [MUTATIONS[name] for name in options.only if name not in done]
    writing = Lock()

    def scored(one: Mutation) -> None:
        outcome = scorer.score(one)
        with writing, open(options.results, "a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
            print(line(outcome), flush=True)

    with tempfile.TemporaryDirectory() as directory, ThreadPoolExecutor(options.jobs) as pool:
        scorer = Scorer(
            Path(directory),
            options.overrides,
            compares=not options.caught_only,
            timeout_s=options.timeout_s,
        )
        for finished in [pool.submit(scored, one) for one in wanted]:
            if error := finished.exception():
                print(f"error: {error}", flush=True)
    lines = options.results.read_text().splitlines() if options.results.is_file() else []
    print(json.dumps(summary([json.loads(each) for each in lines]), indent=2))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
