"""Draws a run for a terminal: step, reward, accuracy, speed, stages, time left."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from nemo_like.observability.progress import (
    RunProgress,
    format_duration,
    format_failed,
    format_reward_parts,
    stage_shares,
)

_SPARK_WIDTH = 40
_SPARKS = "▁▂▃▄▅▆▇█"
_SHARE_WIDTH = 30
_STAGE_COLOURS = {
    "weight_sync": "magenta",
    "generation": "cyan",
    "logprobs": "blue",
    "teacher_logprobs": "bright_cyan",
    "values": "bright_blue",
    "advantage": "white",
    "value_training": "bright_green",
    "policy_training": "green",
    "other": "bright_black",
}


class RunPanel:
    """Draws the progress of a run as a few lines in a frame."""

    def __init__(self, run_name: str, progress: RunProgress) -> None:
        self._run_name, self._progress = run_name, progress
        self._spinner = Spinner("dots")

    def render(self) -> RenderableType:
        """Return the panel with the present values."""
        progress = self._progress
        rows: list[RenderableType] = []
        if progress.step:
            rows += [self._bar(), self._values(), *self._shares()]
        if progress.status or not progress.step:
            self._spinner.update(text=progress.status or "starting")
            rows.append(self._spinner)
        title = f"{self._run_name}  {format_duration(progress.elapsed_s)}"
        return Panel(Group(*rows), title=title, title_align="left", border_style="bright_black")

    def _bar(self) -> RenderableType:
        progress = self._progress
        eta = "" if progress.eta_s is None else f"eta {format_duration(progress.eta_s)}"
        grid = Table.grid(padding=(0, 2), expand=True)
        grid.add_column(no_wrap=True)
        grid.add_column(ratio=1)
        grid.add_column(no_wrap=True, justify="right")
        bar = ProgressBar(total=progress.max_num_steps, completed=progress.step)
        grid.add_row(progress.numbered(progress.step), bar, eta)
        return grid

    def _values(self) -> RenderableType:
        progress, metrics = self._progress, self._progress.metrics
        grid = Table.grid(padding=(0, 2))
        if progress.rewards:
            trend = sparkline(progress.rewards, _SPARK_WIDTH)
            grid.add_row("reward", f"[bold]{progress.rewards[-1]:.3f}[/]", f"[cyan]{trend}[/]")
        if parts := format_reward_parts(metrics):
            grid.add_row("components", "", Text(parts))
        if "train/mean_gen_tokens_per_sample" in metrics:
            length = f"{metrics['train/mean_gen_tokens_per_sample']:.1f}"
            text = f"{metrics['train/truncation_rate']:.1%} truncated"
            grid.add_row("response length", length, text)
        if failed := format_failed(metrics, "train"):
            grid.add_row("failed", f"[bold red]{failed}[/]", "")
        if progress.accuracies:
            (_, first), (step, last) = progress.accuracies[0], progress.accuracies[-1]
            grid.add_row(
                "validation accuracy", f"[bold]{last:.3f}[/]", f"at step {step}, {first:.3f} at the start"
            )
        if progress.has_partial_rewards:
            (_, first), (step, last) = progress.validation_rewards[0], progress.validation_rewards[-1]
            grid.add_row(
                "validation reward", f"[bold]{last:.3f}[/]", f"at step {step}, {first:.3f} at the start"
            )
        if "train/loss" in metrics:
            more = {"grad_norm": "train/grad_norm", "token_mult_prob_error": "train/token_mult_prob_error"}
            text = "  ".join(f"{name} {metrics[key]:.4f}" for name, key in more.items() if key in metrics)
            grid.add_row("loss", f"{metrics['train/loss']:.4f}", text)
        if "performance/tokens_per_sec" in metrics:
            grid.add_row("tokens/s", f"{metrics['performance/tokens_per_sec']:,.0f}", "")
        return grid

    def _shares(self) -> list[RenderableType]:
        """Return a bar that divides the step's time among its stages, and the legend below it."""
        shares = stage_shares(self._progress.metrics)
        if not shares:
            return []
        bar = Text(f"step time {self._progress.metrics['timing/train/total_step_time']:.2f} s  ")
        legend = Text()
        for item in shares:
            colour = _STAGE_COLOURS[item.stage]
            bar.append("█" * round(item.share * _SHARE_WIDTH), style=colour)
            legend.append(f"■ {item.stage} {item.share:.0%}  ", style=colour)
        return [bar, legend]


def sparkline(values: Sequence[float], width: int) -> str:
    """Return the values as at most ``width`` bars, scaled to their range; a bar is the mean of neighbours.

    Values that are not finite are left out.
    """
    finite = [value for value in values if math.isfinite(value)]
    num_bars = min(width, len(finite))
    edges = [len(finite) * i // num_bars for i in range(num_bars + 1)] if num_bars else []
    means = [sum(finite[a:b]) / (b - a) for a, b in pairwise(edges)]
    low, high = (min(means), max(means)) if means else (0.0, 0.0)
    span = (high - low) or 1.0
    return "".join(_SPARKS[min(int((mean - low) / span * len(_SPARKS)), len(_SPARKS) - 1)] for mean in means)
