"""Step costs as Markdown, for docs/explanation/scaling.md."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from nemo_like_tools.scale_plan.hardware import Assumptions
from nemo_like_tools.scale_plan.published import published_steps, published_training
from nemo_like_tools.scale_plan.recipe_workload import LayoutError, Scaling
from nemo_like_tools.scale_plan.step import STAGES, StepCost

# By how much an assumption is made smaller and larger; a share stays at most 1.
_FACTORS = (2 / 3, 1.5)
_NOTABLE = 0.01
_BATCH = {Scaling.weak: "grows", Scaling.strong: "constant"}

# The cost of a recipe's step at a number of GPUs, or why it cannot run.
Planned = Mapping[tuple[str, Scaling, int], StepCost | LayoutError]


def seconds_table(planned: Planned) -> str:
    """Return seconds per stage, a row per recipe, scaling and number of GPUs."""
    head = ["recipe", "batch", "GPUs", "samples", "replicas", "engines", *STAGES, "step", "tokens/s/GPU"]
    rows = []
    for (recipe, scaling, num_gpus), cost in planned.items():
        start = [recipe, _BATCH[scaling], f"{num_gpus:,}"]
        if isinstance(cost, LayoutError):
            rows.append([*start, *[""] * 3, str(cost), *[""] * (len(STAGES) + 1)])
            continue
        load = cost.workload
        layout = [f"{load.num_samples:,}", f"{load.train.dp}", f"{load.num_engines}"]
        seconds = [_seconds(value) for value in cost.seconds.values()]
        rows.append([*start, *layout, *seconds, _seconds(cost.total_s), f"{cost.tokens_per_gpu_s:,.0f}"])
    return _table(head, rows)


def bytes_table(planned: Planned) -> str:
    """Return GB per link, a row per recipe, scaling and number of GPUs."""
    costs = {key: cost for key, cost in planned.items() if isinstance(cost, StepCost)}
    links = list(next(iter(costs.values())).link_bytes) if costs else []
    rows = [
        [recipe, _BATCH[scaling], f"{num_gpus:,}", *(_gigabytes(value) for value in cost.link_bytes.values())]
        for (recipe, scaling, num_gpus), cost in costs.items()
    ]
    return _table(["recipe", "batch", "GPUs", *links], rows)


def host_table(planned: Planned) -> str:
    """Return the times on hosts and their share of the step, at the largest number of GPUs."""
    largest = max((num_gpus for _, _, num_gpus in planned), default=0)
    rows = []
    for (recipe, scaling, num_gpus), cost in planned.items():
        if num_gpus != largest or isinstance(cost, LayoutError):
            continue
        host = cost.host
        share = (host.driver_s + host.data_plane_s) / cost.total_s
        actor = f"{_seconds(host.rollout_actor_s)} / {_seconds(cost.generation.seconds)}"
        seconds = [_seconds(value) for value in (host.driver_s, host.data_plane_s)]
        rows.append([recipe, _BATCH[scaling], f"{num_gpus:,}", *seconds, f"{share:.0%}", actor])
    head = ["recipe", "batch", "GPUs", "driver", "data plane", "both, of the step", "rollout actor / engines"]
    return _table(head, rows)


def published_table(assumptions: Assumptions) -> str:
    """Return published steps beside this plan's estimates."""
    rows = []
    for one in published_steps(assumptions):
        planned_s, load = one.planned_s(assumptions), one.workload
        rows.append(
            [
                one.source,
                one.model,
                one.mode,
                f"{load.num_gpus} {one.gpu.name}",
                f"{load.num_samples:,} x {load.sample_tokens:,.0f}",
                f"{one.step_s:.0f}",
                f"{planned_s:.0f}",
                f"{planned_s / one.step_s:.2f}",
            ]
        )
    head = [
        "source",
        "model",
        "mode",
        "GPUs",
        "samples x mean tokens",
        "published, s",
        "plan, s",
        "plan / published",
    ]
    return _table(head, rows)


def published_stages_table(assumptions: Assumptions) -> str:
    """Return the published times of stages beside this plan's estimates, for publications that give them."""
    rows = []
    for one in published_steps(assumptions):
        seconds = one.planned(assumptions).seconds
        cells = [f"{value:.0f} / {seconds[stage]:.0f}" for stage, value in one.stages_s.items()]
        if cells:
            rows.append([one.source, one.model, f"{one.workload.num_gpus} {one.gpu.name}", *cells])
    return _table(["published / plan, s", "model", "GPUs", "generation", "log-probs", "training"], rows)


def published_training_table(assumptions: Assumptions) -> str:
    """Return published rates of training without sampling beside this plan's estimates."""
    rows = [
        [
            one.source,
            one.model,
            f"{one.workload.num_gpus} h100-sxm",
            f"{one.tokens_per_gpu_s:,.0f}",
            f"{one.planned(assumptions):,.0f}",
        ]
        for one in published_training()
    ]
    return _table(["source", "model", "GPUs", "published, tokens/s/GPU", "plan"], rows)


def sensitivity_table(assumptions: Assumptions, steps: Mapping[str, Callable[[Assumptions], float]]) -> str:
    """Return how much longer steps get when an assumption is a third smaller, and when it is half as large
    again.

    ``steps`` return the seconds of a step under assumptions. An assumption that changes every step by less
    than one per cent is left out.
    """
    before = {name: seconds(assumptions) for name, seconds in steps.items()}
    rows = []
    for field in fields(assumptions):
        value = getattr(assumptions, field.name)
        varied = [_varied(field.name, value, factor) for factor in _FACTORS]
        changes = [
            [seconds(replace(assumptions, **{field.name: other})) / before[name] - 1 for other in varied]
            for name, seconds in steps.items()
        ]
        if max(abs(change) for pair in changes for change in pair) >= _NOTABLE:
            cells = [" / ".join(f"{change:+.0%}" for change in pair) for pair in changes]
            rows.append(
                [f"`{field.name}`", f"{value:.3g}", " / ".join(f"{one:.3g}" for one in varied), *cells]
            )
    return _table(["assumption", "value", "instead", *steps], rows)


def _varied(name: str, value: Any, factor: float) -> Any:
    """Return an assumption times the factor, rounded for an int, and at most 1 for a share."""
    other = value * factor
    if isinstance(value, int):
        return round(other)
    return min(1.0, other) if name.endswith("_share") else other


def _seconds(value: float) -> str:
    return f"{value:.2f}" if value < 10 else f"{value:.0f}"


def _gigabytes(num_bytes: float) -> str:
    value = num_bytes / 1e9
    return f"{value:.2f}" if value < 10 else f"{value:,.0f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
