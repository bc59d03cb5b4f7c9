#!/usr/bin/env python
"""Seconds per step and accuracy when rollouts and training overlap, with environments that take their time.

    python scripts/bench/overlap.py modes [--steps 24] [--tail 1.5 | --median-s S] [--sigma 1.0]
    python scripts/bench/overlap.py tail [--seeds 1,2,3] [--median-s 0.3] [--sigma 1.0]
    python scripts/bench/overlap.py correction [--staleness 0,1,4] [--picture docs/explanation/async.png]
    python scripts/bench/overlap.py journal [--steps 24]

All train the demo's model on the demo's problems, judged by an environment that sleeps for a log-normal time
per sample, by seed, so that two cores suffice. ``scripts/demo.sh`` makes the model before.

``modes`` makes runs of one update per step: synchronous, with exact overlap, and with rollouts one and two
versions ahead. Without --median-s it is chosen so that the slowest sample of a step takes --tail times its
scoring and training, which a short run without latencies measures. It prints, for each mode, seconds per
step, the ideal, their ratio, what ``run_grpo.py --what-if`` predicts from the synchronous run, idle shares
and accuracy.

``tail`` compares the demo, synchronous and one version ahead, over some seeds. ``correction`` makes runs with
and without importance-sampling correction at some bounds of staleness, and draws their accuracies.

``journal`` makes a run without latencies, two versions ahead and with weights in flight, and writes every
line of its journal again with the clock running.

All take key=value arguments for the runs, and --runs DIR, where run directories are kept. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nemo_like.configuration import load_config
from nemo_like.rollout.options import JOURNAL_FOLDER
from nemo_like_tools.what_if.prediction import WhatIf, what_if
from scripts.bench.arguments import at_least
from scripts.bench.overlap_bench.runs import (
    LEAST_STEPS,
    BenchRun,
    Latency,
    ideal_s,
    make_run,
    mean_slowest,
    mode_overrides,
    rewritten,
)

CONFIG = "configs/grpo_arithmetic_cpu.yaml"
MODES = ("synchronous", "exact", "k=1", "k=2")
# A core for the engine and one for the trainer, and one update per step: all of it may overlap.
SMALL = (
    *("grpo.num_prompts_per_step=64", "generation.num_engines=1", "policy.data_parallel_size=1"),
    *(
        "policy.train_global_batch_size=512",
        "grpo.skip_idle_samples=false",
        "grpo.mix_groups_in_updates=false",
    ),
    *("grpo.val_at_start=false", "grpo.val_period=0"),
)
CORRECTED = (
    "loss_fn.use_generation_logprobs_as_prev=false",
    "loss_fn.use_importance_sampling_correction=true",
    "loss_fn.truncated_importance_sampling_type=tis",
    "loss_fn.truncated_importance_sampling_ratio=2.0",
)
UNCORRECTED = (
    "loss_fn.use_generation_logprobs_as_prev=false",
    "loss_fn.use_importance_sampling_correction=false",
)


def main() -> int:
    options = parsed_arguments()
    with run_directory(options.runs) as directory:
        result = options.measure(options, directory)
    print(json.dumps(result, indent=2))
    return 0


def parsed_arguments() -> argparse.Namespace:
    """Return the options; ``measure`` is the function that the command names."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True)
    modes = commands.add_parser("modes")
    modes.set_defaults(measure=measure_modes)
    modes.add_argument("--steps", type=at_least(LEAST_STEPS), default=24)
    modes.add_argument("--tail", type=float, default=1.5, help="slowest sample over scoring and training")
    modes.add_argument("--median-s", type=float, help="of the latencies, instead of --tail")
    modes.add_argument("--modes", type=lambda text: text.split(","), default=MODES)
    tail = commands.add_parser("tail")
    tail.set_defaults(measure=measure_tail)
    tail.add_argument("--seeds", type=_numbers, default=(1, 2, 3))
    tail.add_argument("--median-s", type=float, default=0.3)
    correction = commands.add_parser("correction")
    correction.set_defaults(measure=measure_correction)
    correction.add_argument("--staleness", type=_numbers, default=(0, 1, 4))
    correction.add_argument("--median-s", type=float, default=0.05)
    correction.add_argument("--seed", type=int, default=1)
    correction.add_argument("--picture", type=Path)
    journal = commands.add_parser("journal")
    journal.set_defaults(measure=measure_journal)
    journal.add_argument("--steps", type=at_least(LEAST_STEPS), default=24)
    for command in (modes, tail, correction):
        command.add_argument("--sigma", type=float, default=1.0, help="of the latencies' logarithm")
    for command in (modes, tail, correction, journal):
        command.add_argument("--runs", type=Path, help="keep the run directories here")
        command.add_argument("overrides", nargs="*", metavar="key=value")
    return parser.parse_args()


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(","))


@contextmanager
def run_directory(kept: Path | None) -> Iterator[Path]:
    """Give the block a directory for runs: ``kept``, or a temporary one."""
    if kept is not None:
        kept.mkdir(parents=True, exist_ok=True)
        yield kept.absolute()
        return
    with tempfile.TemporaryDirectory() as directory:
        yield Path(directory)


def measure_modes(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Make a run of each mode; return what each took beside the ideal and the prediction."""
    median_s, overrides = options.median_s, [*SMALL, *CORRECTED, *options.overrides]
    grpo = load_config(CONFIG, overrides).grpo
    slowest = mean_slowest(grpo.num_samples_per_step, options.sigma)
    if median_s is None:
        quick = make_run(CONFIG, directory, "quick", None, [*overrides, "grpo.max_num_steps=10"])
        work_s = statistics.fmean(step.overlappable_s for step in quick.steps)
        median_s = options.tail * work_s / slowest
    latency = Latency(seed=1, median_s=median_s, sigma=options.sigma)
    overrides.append(f"grpo.max_num_steps={options.steps}")
    runs = {
        mode: make_run(CONFIG, directory, mode, latency, [*overrides, *mode_overrides(mode)])
        for mode in ("synchronous", *(mode for mode in options.modes if mode != "synchronous"))
    }
    synchronous = runs["synchronous"]
    predicted = what_if(load_config(CONFIG, overrides), synchronous.path)
    return {
        "median_s": median_s,
        "sigma": options.sigma,
        "slowest_over_work": median_s
        * slowest
        / statistics.fmean(step.overlappable_s for step in synchronous.steps),
        "stages_s": synchronous.mean_stages_s(),
        "modes": {mode: summary(mode, run, synchronous, predicted) for mode, run in runs.items()},
    }


def summary(mode: str, run: BenchRun, synchronous: BenchRun, predicted: WhatIf) -> dict[str, Any]:
    """Return what a mode's run took, and how far that is from the ideal and from the prediction."""
    best_s, predicted_s = ideal_s(mode, synchronous.steps), predicted_step_s(mode, predicted)
    return {
        **run.as_json(),
        "speed_up": synchronous.step_s / run.step_s,
        "ideal_s": best_s,
        "over_ideal": run.step_s / best_s,
        "predicted_s": predicted_s,
        "prediction_error": predicted_s / run.step_s - 1.0,
    }


def predicted_step_s(mode: str, predicted: WhatIf) -> float:
    """Return the predicted seconds of a step for a mode of this benchmark."""
    name = {
        "synchronous": "synchronous",
        "exact": "exact overlap",
        **{f"k={k}": f"max_staleness={k} between_samples" for k in (1, 2, 4)},
    }[mode]
    return next(
        one.result.step_s
        for one in predicted.predictions
        if one.mode.name == name and one.split == predicted.configured
    )


def measure_tail(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Run the demo synchronously and one version ahead over some seeds; compare times and accuracies."""
    by_seed: dict[int, dict[str, Any]] = {}
    for seed in options.seeds:
        latency = Latency(seed=seed, median_s=options.median_s, sigma=options.sigma)
        shared = [f"grpo.seed={seed}", "grpo.val_period=0", *CORRECTED, *options.overrides]
        before, ahead = (
            make_run(CONFIG, directory, f"{mode}-{seed}", latency, [*shared, *mode_overrides(mode)])
            for mode in ("synchronous", "k=1")
        )
        work_s = statistics.fmean(step.overlappable_s for step in before.steps)
        by_seed[seed] = {
            "synchronous": before.as_json(),
            "k=1": ahead.as_json(),
            "slowest_over_work": statistics.fmean(step.generation_s for step in before.steps) / work_s,
            "speed_up": before.step_s / ahead.step_s,
            "accuracy_gained": ahead.accuracy - before.accuracy,
        }
        print(f"seed {seed}: {json.dumps(by_seed[seed])}", file=sys.stderr, flush=True)
    return {
        "least_speed_up": min(one["speed_up"] for one in by_seed.values()),
        "mean_accuracy_gained": statistics.fmean(one["accuracy_gained"] for one in by_seed.values()),
        "by_seed": by_seed,
    }


def measure_correction(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Make runs with and without correction at each bound of staleness; return and draw their accuracies."""
    latency = Latency(seed=options.seed, median_s=options.median_s, sigma=options.sigma)
    curves = {}
    for staleness in options.staleness:
        for name, keys in (("with correction", CORRECTED), ("without", UNCORRECTED)):
            mode = f"k={staleness}" if staleness else "synchronous"
            run = make_run(
                CONFIG,
                directory,
                f"{mode}-{name.replace(' ', '-')}",
                latency,
                [
                    f"grpo.seed={options.seed}",
                    "grpo.val_period=5",
                    *keys,
                    *mode_overrides(mode),
                    *options.overrides,
                ],
            )
            curves[f"k = {staleness}, {name}"] = run.accuracies
    if options.picture is not None:
        draw(options.picture, curves)
    return {name: {"last": curve[-1][1], "curve": curve} for name, curve in curves.items()}


def measure_journal(options: argparse.Namespace, directory: Path) -> dict[str, Any]:
    """Make a run that writes a journal, and return which share of a step it takes to write that again."""
    keys = [*SMALL, *CORRECTED, f"grpo.max_num_steps={options.steps}", "grpo.max_staleness=2"]
    overrides = [*keys, "grpo.weight_updates=in_flight", *options.overrides]
    run = make_run(CONFIG, directory, "journal", None, overrides)
    with tempfile.TemporaryDirectory() as again:
        written = [
            rewritten(path, Path(again)) for path in sorted((run.path / JOURNAL_FOLDER).glob("*/*.jsonl"))
        ]
    journal_s = sum(seconds for _, seconds in written) / options.steps
    return {
        "step_s": run.step_s,
        "lines_per_step": sum(count for count, _ in written) / options.steps,
        "journal_s": journal_s,
        "share": journal_s / run.step_s,
    }


def draw(path: Path, curves: dict[str, list[tuple[int, float]]]) -> None:
    """Draw the accuracies into a PNG file: a colour for each bound, dashed without correction."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    bounds = list(dict.fromkeys(name.partition(",")[0] for name in curves))
    colours = dict(zip(bounds, ("#3a3a3a", "#1f5fa8", "#d1495b", "#2a9d5c", "#e0a030"), strict=False))
    for name, curve in curves.items():
        style = "--" if name.endswith("without") else "-"
        axes.plot(*zip(*curve, strict=True), style, color=colours[name.partition(",")[0]], label=name)
    axes.set_ylim(0.0, 1.05)
    axes.set_xlabel("step")
    axes.set_ylabel("held-out accuracy, sampled")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
