"""What the turns of ``against_others.py`` say: medians, ratios within a round, and the time to a goal."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from scripts.bench.others.turns import Turn

Turns = Mapping[str, Sequence[Turn]]  # by side; as many of each


def step_s(turns: Sequence[Turn]) -> float:
    """Return the median seconds of a step; a turn's first step is not counted."""
    return statistics.median(after - before for turn in turns for before, after in pairwise(turn.ends_s))


def tokens_per_s(turn: Turn) -> float:
    """Return the new tokens per second of a turn without its first step."""
    return sum(turn.new_tokens[1:]) / (turn.ends_s[-1] - turn.ends_s[0])


def summary(turns: Sequence[Turn], goal: float) -> dict[str, Any]:
    """Return the medians of a side, and the accuracies after its turns, if those were measured."""
    seconds = step_s(turns)
    found = {
        "step_s": round(seconds, 4),
        "cpu_s_per_step": round(statistics.median(turn.cpu_s / len(turn.ends_s) for turn in turns), 3),
        "new_tokens_per_step": statistics.median(tokens for turn in turns for tokens in turn.new_tokens[1:]),
        "new_tokens_per_s": round(statistics.median(map(tokens_per_s, turns)), 1),
    }
    if turns[0].accuracy is None:
        return found
    curve = accuracies(turns, seconds)
    reached = next((one["s"] for one in curve if one["accuracy"] >= goal), None)
    return {**found, "goal": goal, "s_to_goal": reached, "accuracies": curve}


def accuracies(turns: Sequence[Turn], seconds: float) -> list[dict[str, float]]:
    """Return the accuracy after each turn, and the seconds until then if every step takes so many."""
    steps, curve = 0, []
    for turn in turns:
        steps += len(turn.ends_s)
        curve.append({"step": steps, "s": round(steps * seconds, 2), "accuracy": turn.accuracy or 0.0})
    return curve


def time_over(turns: Turns, side: str, others: Sequence[str]) -> dict[str, Any] | None:
    """Return how long a side takes for as many new tokens as the fastest of ``others``: the median of the
    rounds' ratios, and the least and greatest. None where none of the others ran."""
    there = [name for name in others if name in turns]
    if not there:
        return None
    best = max(there, key=lambda name: statistics.median(map(tokens_per_s, turns[name])))
    ratios = [
        tokens_per_s(theirs) / tokens_per_s(ours)
        for ours, theirs in zip(turns[side], turns[best], strict=True)
    ]
    return {
        "of": best,
        "median": round(statistics.median(ratios), 3),
        "least": round(min(ratios), 3),
        "greatest": round(max(ratios), 3),
    }


def markdown(result: Mapping[str, Any], abouts: Mapping[str, str]) -> str:
    """Return a size's result as a table."""
    lines = [
        "| | step, s | CPU, s | new tokens/s | s to the goal | memory, GiB |",
        "|---|---|---|---|---|---|",
    ]
    for name, side in result["sides"].items():
        reached = "" if side.get("s_to_goal") is None else f"{side['s_to_goal']:.0f}"
        memory = side["peak_mib"] / 1024
        lines.append(
            f"| {abouts[name]} | {side['step_s']:.2f} | {side['cpu_s_per_step']:.2f} "
            f"| {side['new_tokens_per_s']:,.0f} | {reached} | {memory:.1f} |"
        )
    return "\n".join(lines)
