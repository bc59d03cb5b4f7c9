#!/usr/bin/env python
"""Steps that the demo takes to its teacher's accuracy, by on-policy distillation and by GRPO.

    python scripts/bench/distillation.py [--seed 1] [--grpo-steps 160] [--picture FILE.png] [key=value ...]

Both train the same model on the same problems, with as many samples a step; ``scripts/demo.sh --distill``
makes it and the teacher before. Each has the learning rates of its own demo, which decay over its own steps:
GRPO's 80 end below the goal, so here it has more. The goal is the teacher's own accuracy, of the same
validation, less 0.03. Prints JSON, and draws the accuracies over the steps into the picture.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
GRPO, DISTILLATION = "configs/grpo_arithmetic_cpu.yaml", "configs/distill_arithmetic_cpu.yaml"
SHORTFALL = 0.03
UPDATES_PER_STEP = 8  # of the demo's GRPO
Curve = list[tuple[int, float]]  # (step, accuracy)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1, help="of the models and the runs (default 1)")
    parser.add_argument(
        "--grpo-steps", type=int, default=160, help="over which GRPO's rate decays (default 160)"
    )
    parser.add_argument("--picture", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    teacher = f".cache/models/arithmetic-teacher-d2-s{options.seed}"
    seeds = [f"grpo.seed={options.seed}", f"vars.model_seed={options.seed}", "grpo.val_period=4"]
    as_policy = [f"policy.model_name={teacher}", "grpo.max_num_steps=1", "grpo.val_at_end=false"]
    num_updates = UPDATES_PER_STEP * options.grpo_steps
    longer = [f"grpo.max_num_steps={options.grpo_steps}", f"policy.scheduler.decay_updates={num_updates}"]
    level = accuracies(GRPO, [*seeds, *options.overrides, *as_policy])[0][1]
    goal = level - SHORTFALL
    curves = {
        "distillation": accuracies(DISTILLATION, [*seeds, *options.overrides]),
        "GRPO": accuracies(GRPO, [*seeds, *longer, *options.overrides]),
    }
    result = {name: summary(curve, goal) for name, curve in curves.items()}
    print(json.dumps({"seed": options.seed, "teacher": level, "goal": goal, **result}, indent=2))
    if options.picture is not None:
        draw(options.picture, curves, level, goal)
    return 0


def accuracies(config: str, overrides: list[str]) -> Curve:
    """Make a run and return what its validations found."""
    with tempfile.TemporaryDirectory() as directory:
        command = [sys.executable, "run_grpo.py", "--config", config, *overrides]
        places = [f"logger.log_dir={directory}", "logger.run_name=run", "logger.wandb.mode=disabled"]
        subprocess.run([*command, *places], cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        lines = (Path(directory) / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    key = "validation/accuracy"
    return [(record["step"], record[key]) for record in map(json.loads, lines) if key in record]


def summary(curve: Curve, goal: float) -> dict[str, float | int | None]:
    """Return where the accuracy begins and ends, and the first step whose validation reached the goal."""
    reached = next((step for step, accuracy in curve if accuracy >= goal), None)
    return {"first": curve[0][1], "last": curve[-1][1], "steps_to_goal": reached}


def draw(path: Path, curves: dict[str, Curve], level: float, goal: float) -> None:
    """Draw the accuracies into a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8.0, 4.5), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for (name, curve), colour in zip(curves.items(), ("#d1495b", "#1f5fa8"), strict=True):
        axes.plot(*zip(*curve, strict=True), color=colour, marker="o", markersize=4, label=name)
    axes.axhline(level, color="grey", linewidth=1.0, label=f"the teacher ({level:.3f})")
    axes.axhline(goal, color="grey", linewidth=1.0, linestyle="--", label=f"less {SHORTFALL}")
    axes.set_ylim(0.0, 1.05)
    axes.set_xlabel("step")
    axes.set_ylabel("held-out accuracy, sampled")
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(loc="lower right", frameon=False)
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(main())
