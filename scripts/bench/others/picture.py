"""Draws what ``against_others.py`` measured."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

OURS, OTHERS, BOUND = "#1f5fa8", "#d1495b", "#9a9a9a"


def draw(path: Path, result: Mapping[str, Any], abouts: Mapping[str, str]) -> None:
    """Draw new tokens per second by side into a PNG file, a panel per size, and the accuracies over time."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves = {
        name: side["accuracies"]
        for size in result.values()
        for name, side in size["sides"].items()
        if "accuracies" in side
    }
    num_panels = len(result) + bool(curves)
    figure = Figure(figsize=(8.0, 2.6 * num_panels), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(num_panels, 1, squeeze=False)[:, 0]
    for axes, size in zip(panels, result.values(), strict=False):
        names = list(reversed(size["sides"]))
        speeds = [size["sides"][name]["new_tokens_per_s"] for name in names]
        axes.barh([abouts[name] for name in names], speeds, color=[_colour(name) for name in names])
        axes.set_title(textwrap.fill(size["about"], 64), fontsize=9, loc="left")
        axes.set_xlabel("new tokens per second")
    if curves:
        _draw_accuracies(panels[-1], curves, abouts)
    for axes in panels:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def _draw_accuracies(axes: Any, curves: Mapping[str, Any], abouts: Mapping[str, str]) -> None:
    styles = iter(("-", "--", ":", "-", "--", ":"))
    for name, curve in curves.items():
        seconds, accuracies = ([one[key] for one in curve] for key in ("s", "accuracy"))
        axes.plot(seconds, accuracies, next(styles), color=_colour(name), label=abouts[name])
    axes.set_ylim(0.0, 1.05)
    axes.set_xlabel("seconds of steps")
    axes.set_ylabel("held-out accuracy")
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", frameon=False, fontsize=8)


def _colour(name: str) -> str:
    return BOUND if name == "bare" else OTHERS if name.startswith("trl") else OURS
