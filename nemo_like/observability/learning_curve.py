"""Draws the learning curve: training reward and validation accuracy over the steps."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

from nemo_like.observability.caches import matplotlib_directory
from nemo_like.observability.disk import write_whole

_REWARD_COLOUR = "#7aa6d8"
_TREND_COLOUR = "#1f5fa8"
_ACCURACY_COLOUR = "#d1495b"
_TREND_STEPS = 9


@dataclass(slots=True)
class CurvePoints:
    """The points of a learning curve: (step, value) pairs, sorted by step."""

    rewards: list[tuple[int, float]] = field(default_factory=list)
    accuracies: list[tuple[int, float]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.rewards or self.accuracies)


def write_learning_curve(path: Path, points: CurvePoints, title: str) -> None:
    """Draw ``points`` into a PNG file, without a display. Raises DiskFull or OSError."""
    os.environ.update(own := matplotlib_directory())
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    for name in own:
        del os.environ[name]
    figure = Figure(figsize=(8.0, 4.5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    if points.rewards:
        steps, rewards = zip(*points.rewards, strict=True)
        axes.plot(steps, rewards, color=_REWARD_COLOUR, linewidth=1.0, alpha=0.7, label="training reward")
        axes.plot(steps, _running_mean(rewards), color=_TREND_COLOUR, linewidth=2.0, label="its running mean")
    if points.accuracies:
        steps, accuracies = zip(*points.accuracies, strict=True)
        axes.plot(
            steps, accuracies, color=_ACCURACY_COLOUR, linewidth=1.5, marker="o", markersize=5,
            label="validation accuracy",
        )  # fmt: skip
        for step, accuracy in {points.accuracies[0], points.accuracies[-1]}:
            axes.annotate(
                f"{accuracy:.2f}", (step, accuracy), textcoords="offset points", xytext=(0, 8), ha="center",
                color=_ACCURACY_COLOUR,
            )  # fmt: skip
    values = [value for _, value in (*points.rewards, *points.accuracies)]
    if values and min(values) >= 0.0 and max(values) <= 1.0:
        axes.set_ylim(0.0, 1.05)
    axes.set_xlabel("step")
    axes.set_ylabel("reward, accuracy")
    axes.set_title(title)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    if points:
        axes.legend(loc="lower right", frameon=False)
    picture = BytesIO()
    figure.savefig(picture, format="png")
    write_whole(path, picture.getvalue(), "the learning curve")


def _running_mean(values: Sequence[float]) -> list[float]:
    """Return the mean over a window centred on each value; at both ends the window is cut short."""
    reach = _TREND_STEPS // 2
    windows = [values[max(0, i - reach) : i + reach + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]
