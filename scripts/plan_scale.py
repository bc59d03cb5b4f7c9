#!/usr/bin/env python
"""Seconds per stage and bytes per link of a step, at numbers of GPUs on which nobody has measured it.

    python scripts/plan_scale.py [--config recipes/X.yaml ...] [--gpus 8,64,256,1024] [--gpu h100-sxm]
                                 [--mean-response 0.33] [--json]

A recipe that --config names is planned on one, two, four and eight times its own GPUs unless --gpus is given.
It computes them from the model's arithmetic, from data sheets and from what the driver and the data plane
took on CPUs. Prints the tables of docs/explanation/scaling.md, which says what they are worth. A recipe's
layout grows by replicas and engines; its batch grows with the GPUs ("grows") or stays as it is ("constant").
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nemo_like.config.problems import ConfigError
from nemo_like.configuration import Config, load_config
from nemo_like.models.model_info import planned_shape, read_model_info
from nemo_like.observability.printable import accept_all_characters
from nemo_like_tools.scale_plan import tables
from nemo_like_tools.scale_plan.hardware import GPUS, Assumptions, GpuDataSheet
from nemo_like_tools.scale_plan.recipe_workload import LayoutError, Scaling, scaled
from nemo_like_tools.scale_plan.step import StepCost, step_cost

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
# The smallest recipe of each model: its layout is what grows.
DEFAULT_CONFIGS = tuple(
    RECIPES / f"grpo-{name}.yaml"
    for name in ("qwen2.5-1.5b-1n8g", "qwen3-8b-1n8g", "llama3.1-8b-1n8g", "qwen3-30b-a3b-4n8g")
)
DEFAULT_GPUS = (8, 64, 256, 1024)
MULTIPLES = (1, 2, 4, 8)  # of the GPUs of a recipe that --config names
# Of the table that says which assumptions matter: a dense model and a mixture, with a batch that grows.
VARIED = (("grpo-qwen3-8b-1n8g", 256), ("grpo-qwen3-8b-1n8g", 1024), ("grpo-qwen3-30b-a3b-4n8g", 256))


def main() -> int:
    accept_all_characters()
    options = parsed_arguments()
    gpu = GPUS[options.gpu]
    assumptions = replace(Assumptions(), mean_response_share=options.mean_response)
    try:
        planned = plan(options.config, options.gpus, gpu, assumptions)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    if options.json:
        print(json.dumps(as_json(planned, gpu, assumptions), indent=2))
        return 0
    sections = step_tables(planned)
    if options.config == DEFAULT_CONFIGS:
        sections |= comparisons(gpu, assumptions)
    print("\n\n".join(f"{title}\n\n{table}" for title, table in sections.items()))
    return 0


def parsed_arguments() -> argparse.Namespace:
    """Return the options; ``config`` is a tuple of paths."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", type=Path, action="append", help="a recipe; may be given several times")
    parser.add_argument("--gpus", type=_numbers, help="numbers of GPUs")
    parser.add_argument("--gpu", choices=GPUS, default="h100-sxm")
    parser.add_argument(
        "--mean-response",
        type=_share,
        default=Assumptions().mean_response_share,
        help="mean response length over generation.max_new_tokens, between 0 and 1",
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if not options.config and not options.gpus:
        options.gpus = DEFAULT_GPUS
    options.config = tuple(options.config or DEFAULT_CONFIGS)
    return options


def _numbers(text: str) -> tuple[int, ...]:
    numbers = tuple(int(number) for number in text.split(","))
    if min(numbers) < 1:
        raise argparse.ArgumentTypeError(f"{text} has a number of GPUs below 1")
    return numbers


def _share(text: str) -> float:
    share = float(text)
    if not 0 < share < 1:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1")
    return share


def plan(
    configs: Sequence[Path], gpus: Sequence[int] | None, gpu: GpuDataSheet, assumptions: Assumptions
) -> dict[tuple[str, Scaling, int], StepCost | LayoutError]:
    """Return every recipe's step at every number of GPUs, with a batch that grows and with a constant one;
    without numbers, at multiples of the recipe's own.

    Raises ConfigError for a configuration that does not load, or whose model is not there.
    """
    return {
        (path.stem, scaling, num_gpus): planned_step(cfg, num_gpus, scaling, gpu, assumptions)
        for path in configs
        for cfg in [load_config(path)]
        for scaling in Scaling
        for num_gpus in gpus or multiples(cfg)
    }


def multiples(cfg: Config) -> tuple[int, ...]:
    """Return multiples of the number of GPUs that a recipe has; one without GPUs counts as one."""
    own = max(1, cfg.cluster.num_nodes * cfg.cluster.gpus_per_node)
    return tuple(own * factor for factor in MULTIPLES)


def planned_step(
    cfg: Config, num_gpus: int, scaling: Scaling, gpu: GpuDataSheet, assumptions: Assumptions
) -> StepCost | LayoutError:
    """Return a recipe's step on ``num_gpus`` GPUs, or why there is none."""
    shape = planned_shape(cfg.policy.model_name) or cfg.policy.model_name
    model = read_model_info(str(shape), cfg.policy.backend)
    try:
        return step_cost(scaled(cfg, model, num_gpus, scaling, assumptions), gpu, assumptions)
    except LayoutError as error:
        return error


def step_tables(planned: dict[tuple[str, Scaling, int], StepCost | LayoutError]) -> dict[str, str]:
    """Return the tables of the recipes' steps, by title."""
    return {
        "Seconds": tables.seconds_table(planned),
        "GB": tables.bytes_table(planned),
        "Hosts, seconds": tables.host_table(planned),
    }


def comparisons(gpu: GpuDataSheet, assumptions: Assumptions) -> dict[str, str]:
    """Return the tables that say how far this plan can be trusted, by title."""

    def seconds_of(recipe: str, num_gpus: int) -> Callable[[Assumptions], float]:
        cfg = load_config(RECIPES / f"{recipe}.yaml")

        def seconds(varied: Assumptions) -> float:
            cost = planned_step(cfg, num_gpus, Scaling.weak, gpu, varied)
            if isinstance(cost, LayoutError):
                raise cost
            return cost.total_s

        return seconds

    varied = {f"{recipe}, {num_gpus:,}": seconds_of(recipe, num_gpus) for recipe, num_gpus in VARIED}
    return {
        "Published steps": tables.published_table(assumptions),
        "Published stages": tables.published_stages_table(assumptions),
        "Published training": tables.published_training_table(assumptions),
        "Assumptions": tables.sensitivity_table(assumptions, varied),
    }


def as_json(
    planned: dict[tuple[str, Scaling, int], StepCost | LayoutError],
    gpu: GpuDataSheet,
    assumptions: Assumptions,
) -> dict[str, Any]:
    """Return the steps, and the rates and assumptions behind them."""
    steps = []
    for (recipe, scaling, num_gpus), cost in planned.items():
        step: dict[str, Any] = {"recipe": recipe, "batch": scaling.value, "gpus": num_gpus}
        if isinstance(cost, LayoutError):
            steps.append(step | {"no_layout": str(cost)})
            continue
        steps.append(
            step
            | {
                "samples": cost.workload.num_samples,
                "layout": asdict(cost.workload.train) | {"engines": cost.workload.num_engines},
                "seconds": cost.seconds,
                "step_s": cost.total_s,
                "tokens_per_gpu_s": cost.tokens_per_gpu_s,
                "bytes": cost.link_bytes,
                "decode_steps": cost.generation.decode_steps,
                "training_share_of_peak_flops": cost.training.model_flops_share,
            }
        )
    return {"gpu": asdict(gpu), "assumptions": asdict(assumptions), "steps": steps}


if __name__ == "__main__":
    sys.exit(main())
