#!/usr/bin/env python
"""This framework beside TRL: seconds and CPU seconds per step, new tokens per second, time to an
accuracy, memory.

    python scripts/bench/against_others.py --trl DIR [--sizes demo 17m] [--sides NAME ...] [--rounds 6]
        [--steps 8] [--threads 2] [--goal 0.7] [--out FILE.json] [--picture FILE.png] [key=value ...]

All sides train the demo's task from the same checkpoint, in batches of the same size: this framework
(``synchronous``, ``exact``, ``ahead``), TRL's GRPOTrainer (``trl``, ``trl_vllm``), and as a bound ``bare``,
vLLM's generate followed by a plain forward and backward pass. They take turns of a few steps, in each of
which the others wait; the first step of a turn is not counted. Prints JSON, with what is not equal between
the sides, and a table. ``scripts/demo.sh`` makes the demo's model before.

A run needs no TRL. It has a folder of its own, DIR, which only its processes see; what else it needs this
project needs too, and a second copy of pyarrow would break it:

    python -m pip install --no-deps --target DIR trl
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import ExitStack
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from nemo_like.configuration import load_config
from nemo_like.rules.rules import validate
from scripts.bench.arguments import at_least
from scripts.bench.others.differences import differences
from scripts.bench.others.picture import draw
from scripts.bench.others.sides import KINDS, environment, started, trl_problem
from scripts.bench.others.summary import markdown, summary, time_over
from scripts.bench.others.task import CONFIG, SIZES, Size, make_random_model
from scripts.bench.others.turns import Turn

MEMORY_STEPS = 2  # after the turns, while somebody looks at the memory


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default=CONFIG)
    parser.add_argument("--trl", type=Path, metavar="DIR", help="where TRL is installed")
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--sides", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--rounds", type=at_least(1), default=6, help="turns of each side (default 6)")
    parser.add_argument("--steps", type=at_least(2), default=8, help="of a turn (default 8)")
    parser.add_argument(
        "--threads", type=at_least(1), default=2, help="of sides that are one process (default 2)"
    )
    parser.add_argument("--goal", type=float, default=0.7, help="held-out accuracy (default 0.7)")
    parser.add_argument("--out", type=Path, metavar="FILE.json")
    parser.add_argument("--picture", type=Path, metavar="FILE.png")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    options = parser.parse_args()
    if (problem := trl_problem(options.sides, options.trl)) is not None:
        parser.error(problem)
    result = {name: measure(options, SIZES[name]) for name in options.sizes}
    text = json.dumps({**result, "not_measured": not_measured()}, indent=2)
    print(text)
    for size in result.values():
        print(f"\n{markdown(size, abouts())}", file=sys.stderr)
    if options.out is not None:
        options.out.write_text(text + "\n", encoding="utf-8")
    if options.picture is not None:
        draw(options.picture, result, abouts())
    return 0


def measure(options: argparse.Namespace, size: Size) -> dict[str, Any]:
    """Start all sides, let them take turns, and return what each took."""
    make_random_model()
    with ExitStack() as stack:
        sides = {name: stack.enter_context(side_of(options, size, name)) for name in options.sides}
        for side in sides.values():
            side.wait_until_ready()
        before = os.getloadavg()
        turns: dict[str, list[Turn]] = {name: [] for name in sides}
        for _ in range(options.rounds):
            for name, side in sides.items():
                learns = size.learns and name != "bare"
                turns[name].append(side.turn(options.steps, measures_accuracy=learns))
                # A run that is ended early leaves these.
                print(f"{name}: {json.dumps(asdict(turns[name][-1]))}", file=sys.stderr, flush=True)
        after = os.getloadavg()
        peaks = {name: side.peak_mib(MEMORY_STEPS) for name, side in sides.items()}
    ours = [name for name in sides if KINDS[name].is_ours]
    trl = [name for name in KINDS if KINDS[name].is_trl]
    return {
        "about": size.about,
        "rounds": options.rounds,
        "steps_per_turn": options.steps,
        "load_average": [before[0], after[0]],
        "cores": os.cpu_count(),
        "threads_of_one_process": options.threads,
        "sides": {
            name: {**summary(done, options.goal), "peak_mib": peaks[name]} for name, done in turns.items()
        },
        "time_over_best_trl": {name: time_over(turns, name, trl) for name in ours},
        "time_over_bare": {name: time_over(turns, name, ["bare"]) for name in ours},
        "not_equal": differences(options.sides),
    }


def side_of(options: argparse.Namespace, size: Size, name: str) -> Any:
    """Return the context in which a side is up."""
    further = size.exact_overlap if name == "exact" else ()
    overrides = [*size.overrides, *KINDS[name].overrides, *further, *options.overrides]
    cfg = load_config(options.config, overrides)
    validate(cfg)
    env = environment(KINDS[name], cfg, options.trl, options.threads)
    return started(name, options.config, overrides, env)


def abouts() -> dict[str, str]:
    """Return what each side is called in tables and pictures."""
    return {name: kind.about for name, kind in KINDS.items()}


def not_measured() -> dict[str, str]:
    """Return why frameworks that need GPUs have no figures."""
    return {
        name: "needs a GPU, and this script has no side for it" if find_spec(package) else "not installed"
        for name, package in (("verl", "verl"), ("prime-rl", "prime_rl"))
    }


if __name__ == "__main__":
    sys.exit(main())
