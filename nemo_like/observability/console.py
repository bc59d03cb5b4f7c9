"""What the user sees while a run is going: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, TextIO

from nemo_like.config.schema import ConsoleMode
from nemo_like.observability.progress import RunProgress, format_duration, stage_shares


class Console(Protocol):
    """Shows progress; every call returns at once."""

    def status(self, text: str) -> None:
        """What is going on while there is no step to show, such as "starting engines"."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def validation(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def note(self, text: str) -> None:
        """A line that stays."""

    def close(self) -> None:
        """Leave the terminal as it was; safe to call twice. ``note`` still works."""


def make_console(mode: ConsoleMode, stream: TextIO, run_name: str, progress: RunProgress) -> Console:
    """``auto`` is live on a terminal and plain elsewhere."""
    if mode is ConsoleMode.live or (mode is ConsoleMode.auto and stream.isatty()):
        from nemo_like.observability.live_console import LiveConsole

        return LiveConsole(stream, run_name, progress)
    return PlainConsole(stream, progress)


class PlainConsole:
    """One line per event, flushed, without colours or cursor movements."""

    def __init__(self, stream: TextIO, progress: RunProgress) -> None:
        self._stream = stream
        self._progress = progress

    def status(self, text: str) -> None:
        self._progress.status = text
        self.note(f"[{format_duration(self._progress.elapsed_s)}] {text}")

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        self._progress.on_step(step, metrics)
        self.note(
            f"step {step}/{self._progress.max_num_steps}  {_describe_step(metrics, self._progress.eta_s)}"
        )

    def validation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._progress.on_validation(step, metrics)
        accuracy = metrics.get("validation/accuracy")
        if accuracy is not None:
            self.note(f"step {step}/{self._progress.max_num_steps}  validation accuracy {accuracy:.3f}")

    def note(self, text: str) -> None:
        self._stream.write(f"{text}\n")
        self._stream.flush()

    def close(self) -> None:
        self._stream.flush()


def _describe_step(metrics: Mapping[str, float], eta_s: float | None) -> str:
    """A step's numbers on one line; what a step did not measure is left out."""
    formats = {
        "train/reward": "reward {:.3f}",
        "train/loss": "loss {:.4f}",
        "train/grad_norm": "grad_norm {:.3f}",
        "performance/tokens_per_sec": "tokens/s {:.0f}",
        "timing/train/total_step_time": "step time {:.2f} s",
    }
    parts = [template.format(metrics[name]) for name, template in formats.items() if name in metrics]
    shares = ", ".join(f"{item.stage} {item.share:.0%}" for item in stage_shares(metrics))
    if shares:
        parts[-1] += f" ({shares})"
    if eta_s is not None:
        parts.append(f"eta {format_duration(eta_s)}")
    return "  ".join(parts)
