#!/usr/bin/env python
"""Disturb whole runs at random, and compare each with a twin that nothing disturbed.

    python scripts/chaos.py --seed 1 [--disturbances 100] [--runs 20] [--per-run 5] [--output chaos-1]

The script kills and pauses processes of a run and sends them signals, at moments drawn from the seed. A run
that ends early is started again by the same command until it has finished. Every run must end up with the
metrics and the weights of its undisturbed twin, say why whenever it ends early, hang nowhere, and leave
nothing behind on the machine.

Each run adds a line to OUTPUT/results.jsonl; the same command, given again, goes on after the last line.
OUTPUT also gets what each run printed and what was done to it (RUN.log) and the stacks of a run that hung.
The directory of a disturbed run is kept only if the run broke one of these rules; then the exit code is 1.
Leftovers are found by comparing this machine before and after a run, so nothing else should run on it
meanwhile.

Uses modules of tests/, and so needs what they need: bash scripts/setup.sh --dev.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nemo_like.observability.jsonl import json_object, read_metrics, without_measurements
from nemo_like.observability.printable import accept_all_characters
from scripts.tests_packages import packages_of_the_tests

with packages_of_the_tests():
    from tests.chaos.disturbed_run import DisturbedRun, Speed
    from tests.chaos.leftovers import Traces, unfinished
    from tests.chaos.plan import NUM_STEPS, VARIANTS, draw_plan

CONFIGS = Path(__file__).resolve().parents[1] / "tests" / "chaos" / "variants"


def main() -> int:
    accept_all_characters()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--disturbances", type=int, default=100, help="at least so many (default 100)")
    parser.add_argument("--runs", type=int, default=20, help="at least so many (default 20)")
    parser.add_argument("--per-run", type=int, default=5, help="disturbances planned for a run (default 5)")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS, help="default: all")
    parser.add_argument("--output", type=Path, help="default: runs/chaos-SEED")
    options = parser.parse_args()
    # SIGTERM ends the run under way as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    output = (options.output or Path(f"runs/chaos-{options.seed}")).absolute()
    output.mkdir(parents=True, exist_ok=True)
    with short_temporary_directory():
        results = Campaign(output, options.seed, options.variants, options.per_run)
        while results.num_disturbances < options.disturbances or len(results.done) < options.runs:
            results.run_next()
    print(results.summary())
    return 1 if results.failed else 0


class Campaign:
    """A series of disturbed runs, one after the other, each with a line in results.jsonl."""

    def __init__(self, output: Path, seed: int, variants: Sequence[str], per_run: int) -> None:
        self._output, self._seed, self._variants, self._per_run = output, seed, variants, per_run
        self._results = output / "results.jsonl"
        lines = self._results.read_bytes().splitlines() if self._results.exists() else []
        # A line that a kill cut short is made again.
        self.done = [result for line in lines if (result := json_object(line)) is not None]
        if len(self.done) < len(lines):
            self._results.write_text("".join(json.dumps(result) + "\n" for result in self.done))

    @property
    def num_disturbances(self) -> int:
        return sum(len(result["disturbances"]) for result in self.done)

    @property
    def failed(self) -> list[dict[str, Any]]:
        return [result for result in self.done if result["problems"]]

    def run_next(self) -> None:
        """Make the run whose number is next, disturb it by the plan that the seed gives for it, and record
        the result."""
        number = len(self.done)
        variant = self._variants[number % len(self._variants)]
        twin = self._twin(variant)
        plan = draw_plan(self._seed, number, num_disturbances=self._per_run)
        name = f"{number:03}-{variant}-{self._seed}"
        shutil.rmtree(self._output / name, ignore_errors=True)
        run = DisturbedRun(self._output, CONFIGS / f"{variant}.yaml", name, plan, twin.speed)
        run_and_compare_machine(run)
        if not run.problems:
            run.problems += twin.differences(run.run_dir)
        result = {
            "run": number,
            "variant": variant,
            "starts": [start.summary() for start in run.starts],
            "disturbances": run.with_consequences(),
            "problems": run.problems,
        }
        self.done.append(result)
        with self._results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(result) + "\n")
        print(f"{name}: {line_about(result)}", flush=True)
        if not run.problems:
            shutil.rmtree(run.run_dir)

    def _twin(self, variant: str) -> Twin:
        """Return the undisturbed twin of a variant; make its run unless the output directory has it."""
        path = self._output / f"twin-{variant}.json"
        if not path.exists():
            name = f"twin-{variant}"
            shutil.rmtree(self._output / name, ignore_errors=True)
            run = DisturbedRun(self._output, CONFIGS / f"{variant}.yaml", name, (), None)
            run_and_compare_machine(run)
            if run.problems:
                raise SystemExit(f"the undisturbed run {name} failed: {'; '.join(run.problems)}")
            path.write_text(json.dumps(run.starts[0].speed(NUM_STEPS)), encoding="utf-8")
            print(f"{name}: {path.read_text(encoding='utf-8')}", flush=True)
        return Twin(self._output / f"twin-{variant}", Speed(**json.loads(path.read_text(encoding="utf-8"))))

    def summary(self) -> str:
        """Return a text that counts which role was hit by what and what followed, and then names the problems
        of the runs that failed."""
        counts = Counter(
            (hit["role"], kind_of(hit), disturbance["then"])
            for result in self.done
            for disturbance in result["disturbances"]
            for hit in disturbance["hit"]
        )
        lines = [f"{len(self.done)} runs, {self.num_disturbances} disturbances, {len(self.failed)} failed"]
        lines += [f"  {count:3}  {' | '.join(key)}" for key, count in sorted(counts.items())]
        lines += [
            f"  run {result['run']}: {problem}" for result in self.failed for problem in result["problems"]
        ]
        return "\n".join(lines)


class Twin:
    """The undisturbed run of a variant, with which disturbed ones are compared; ``speed`` is how long its
    phases took."""

    def __init__(self, run_dir: Path, speed: Speed) -> None:
        self._run_dir, self.speed = run_dir, speed

    def differences(self, run_dir: Path) -> list[str]:
        """Return sentences on what differs in metrics and weights, the first five and how many more there
        are."""
        ours, theirs = metrics_of(self._run_dir), metrics_of(run_dir)
        if [record["step"] for record in ours] != [record["step"] for record in theirs]:
            return [f"metrics have steps {[record['step'] for record in theirs]}"]
        found = [
            f"step {mine['step']}: {name} is {other.get(name)}, not {mine.get(name)}"
            for mine, other in zip(ours, theirs, strict=True)
            for name in sorted(mine.keys() | other.keys())
            if mine.get(name) != other.get(name)
        ]
        if weights_of(self._run_dir) != weights_of(run_dir):
            found.append("final_hf has other weights")
        return found[:5] + ([f"and {len(found) - 5} more"] if len(found) > 5 else [])


def metrics_of(run_dir: Path) -> list[dict[str, Any]]:
    return [without_measurements(record) for record in read_metrics(run_dir / "metrics.jsonl")]


def weights_of(run_dir: Path) -> dict[str, str]:
    """Return the SHA-256 of each file of exported weights, by name; none where nothing was exported."""
    paths = sorted((run_dir / "final_hf").glob("*.safetensors"))
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def run_and_compare_machine(run: DisturbedRun) -> None:
    """Make the run, and add to its problems what it left on the machine or unfinished."""
    before = Traces.now()
    run.run()
    run.problems += [*Traces.now().since(before), *unfinished(run.run_dir)]


def kind_of(hit: dict[str, Any]) -> str:
    return (
        hit["signal"]
        if hit["pause_s"] is None
        else f"SIGSTOP for {'< 5' if hit['pause_s'] < 6 else '> 15'} s"
    )


def line_about(result: dict[str, Any]) -> str:
    starts = ", ".join(f"{start['returncode']} after {start['seconds']:.0f} s" for start in result["starts"])
    hits = ", ".join(
        "+".join(f"{hit['signal']} {hit['role']}" for hit in one["hit"]) + f" ({one['then']})"
        for one in result["disturbances"]
    )
    return f"{'FAILED: ' + '; '.join(result['problems']) if result['problems'] else 'ok'} [{starts}] {hits}"


@contextmanager
def short_temporary_directory() -> Iterator[None]:
    """Have the runs and their Ray put temporary files into a folder of this process within the block, so that
    what a run leaves there is found.

    The folder's path is short, since some of the files are sockets.
    """
    with tempfile.TemporaryDirectory(prefix="c", ignore_cleanup_errors=True) as directory:
        previous, tempfile.tempdir = tempfile.tempdir, directory
        try:
            yield
        finally:
            tempfile.tempdir = previous


if __name__ == "__main__":
    sys.exit(main())
