"""Consoles show the user a run: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Protocol, TextIO

from nemo_like.config.secrets import masked
from nemo_like.observability.options import ConsoleMode
from nemo_like.observability.printable import accept_all_characters, printable
from nemo_like.observability.progress import (
    RunProgress,
    format_duration,
    format_failed,
    format_reward_parts,
    stage_shares,
)


class Console(Protocol):
    """Shows the progress of a run; every call returns at once."""

    def status(self, text: str) -> None:
        """Show what the run is doing outside of steps, such as "starting engines"."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def validation(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def note(self, text: str) -> None:
        """Print a line that stays on the screen."""

    def close(self) -> None:
        """Restore the terminal; safe to call twice. ``note`` still works afterwards."""


def make_console(mode: ConsoleMode, stream: TextIO, run_name: str, progress: RunProgress) -> Console:
    """Return the console of ``mode``; ``auto`` is live on a terminal and plain elsewhere."""
    accept_all_characters()
    if mode is ConsoleMode.live or (mode is ConsoleMode.auto and stream.isatty()):
        from nemo_like.observability.live_console import LiveConsole

        return LiveConsole(stream, run_name, progress)
    return PlainConsole(stream, progress)


class QuietConsole:
    """A console that shows nothing, but still counts the run's progress."""

    def __init__(self, progress: RunProgress) -> None:
        self._progress = progress

    def status(self, text: str) -> None:
        self._progress.status = text

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._progress.on_step(step, metrics)

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._progress.on_validation(step, metrics)

    def note(self, text: str) -> None: ...

    def close(self) -> None: ...


class PlainConsole:
    """A console that prints and flushes one line per event, without colours or cursor movements.

    When the stream fails, because its disk is full or its reader is gone, lines go to standard error.
    """

    def __init__(self, stream: TextIO, progress: RunProgress) -> None:
        self._stream = stream
        self._progress = progress

    def status(self, text: str) -> None:
        self._progress.status = text
        self.note(f"[{format_duration(self._progress.elapsed_s)}] {text}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._progress.on_step(step, metrics)
        self.note(f"{self._progress.numbered(step)}  {_describe_step(metrics, self._progress.eta_s)}")

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._progress.on_validation(step, metrics)
        accuracy, failed = metrics.get("validation/accuracy"), format_failed(metrics, "validation")
        reward = metrics.get("validation/reward", accuracy)
        parts = [f"validation accuracy {accuracy:.3f}"] if accuracy is not None else []
        parts += [f"validation reward {reward:.3f}"] if reward != accuracy else []
        parts += [f"validation: {failed}" if not parts else failed] if failed else []
        if parts:
            self.note("  ".join([self._progress.numbered(step), *parts]))

    def note(self, text: str) -> None:
        for stream in (self._stream, sys.stderr):
            try:
                stream.write(f"{printable(masked(text))}\n")
                stream.flush()
            except OSError:
                _drop_output(stream)
            else:
                self._stream = stream
                return

    def close(self) -> None:
        """Do nothing: every line was flushed."""


def _drop_output(stream: TextIO) -> None:
    """Connect the stream to /dev/null: it still holds a line, which Python would fail to write at exit."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def _describe_step(metrics: Mapping[str, float], eta_s: float | None) -> str:
    """Return the numbers of a step on one line, leaving out numbers that the step did not measure."""
    formats = {
        "train/mean_gen_tokens_per_sample": "length {:.1f}",
        "train/truncation_rate": "truncated {:.1%}",
        "train/loss": "loss {:.4f}",
        "train/grad_norm": "grad_norm {:.3f}",
        "performance/tokens_per_sec": "tokens/s {:.0f}",
        "timing/train/total_step_time": "step time {:.2f} s",
    }
    failed = format_failed(metrics, "train")
    parts = [failed] if failed else []
    if "train/reward" in metrics:
        components = format_reward_parts(metrics)
        parts.append(f"reward {metrics['train/reward']:.3f}" + (f" ({components})" if components else ""))
    parts += [template.format(metrics[name]) for name, template in formats.items() if name in metrics]
    shares = ", ".join(f"{item.stage} {item.share:.0%}" for item in stage_shares(metrics))
    if shares:
        parts[-1] += f" ({shares})"
    if eta_s is not None:
        parts.append(f"eta {format_duration(eta_s)}")
    return "  ".join(parts)
