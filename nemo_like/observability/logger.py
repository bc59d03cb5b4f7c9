"""One small interface in front of console, metrics file, W&B and learning curve."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import TracebackType
from typing import Any, TextIO

from nemo_like.config.schema import LoggerConfig, WandbMode
from nemo_like.observability.console import make_console
from nemo_like.observability.jsonl import MetricsFile
from nemo_like.observability.learning_curve import CurvePoints, write_learning_curve
from nemo_like.observability.progress import RunProgress
from nemo_like.observability.run_directory import RunDirectory
from nemo_like.observability.summary import RunSummary, format_summary
from nemo_like.observability.wandb_logger import WandbLogger

# How long W&B may keep the user waiting at the end of a run, and when the run was cut short.
_WANDB_FINISH_S = 10.0
_WANDB_ABANDON_S = 3.0

# Above this, trainer and generation engine disagree on what was sampled, and learning may go wrong.
_MAX_TOKEN_MULT_PROB_ERROR = 1.05


class RunLogger:
    """Metrics arrive under their final names (``train/reward``, ``timing/train/generation``, ...).

    Use it as a context manager, so that the terminal is restored and the files are complete whatever
    happens; ``finish`` prints the summary.
    """

    def __init__(
        self,
        cfg: LoggerConfig,
        directory: RunDirectory,
        *,
        resolved_config: Mapping[str, Any],
        max_num_steps: int,
        stream: TextIO | None = None,
    ) -> None:
        """``stream`` is where the user looks; null: standard output."""
        self._cfg = cfg
        self._directory = directory
        self._progress = RunProgress(max_num_steps)
        self._points = CurvePoints()
        self._has_warned_of_mismatch = False
        self._wandb = WandbLogger(cfg.wandb, directory.path, resolved_config)
        self._metrics_file = MetricsFile(directory.metrics_path)
        self._console = make_console(cfg.console, stream or sys.stdout, directory.name, self._progress)

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def status(self, text: str) -> None:
        """What is going on outside steps, such as "starting 2 vLLM engines"."""
        self._console.status(text)

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of rollout step ``step``, counted from 1."""
        self._metrics_file.write(step, metrics)
        self._wandb.log(step, metrics)
        if "train/reward" in metrics:
            self._points.rewards.append((step, metrics["train/reward"]))
        self._console.step(step, metrics)
        error = metrics.get("train/token_mult_prob_error", 1.0)
        if error > _MAX_TOKEN_MULT_PROB_ERROR and not self._has_warned_of_mismatch:
            self._has_warned_of_mismatch = True
            self._console.note(
                f"warning: token_mult_prob_error is {error:.3f} at step {step}, over "
                f"{_MAX_TOKEN_MULT_PROB_ERROR}: trainer and generation engines disagree on the log-probs"
            )

    def log_validation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of the validation after step ``step``; 0 is before the first."""
        self._metrics_file.write(step, metrics)
        self._wandb.log(step, metrics)
        if "validation/accuracy" in metrics:
            self._points.accuracies.append((step, metrics["validation/accuracy"]))
        self._console.validation(step, metrics)

    def finish(self, summary: RunSummary) -> None:
        """Write everything out and print the summary; the last line is ``run_dir: PATH``."""
        self._console.status("writing the results")
        paths = self._write_results()
        wandb_problem = self._wandb.finish(timeout_s=_WANDB_FINISH_S)
        self._console.close()
        for line in format_summary(summary, self._progress, paths):
            self._console.note(line)
        if wandb_problem:
            self._console.note(f"warning: {wandb_problem}")
        self._console.note(f"run_dir: {self._directory.path}")

    def close(self) -> None:
        """Restore the terminal and complete the files; safe after ``finish`` and to call twice."""
        self._console.close()
        self._metrics_file.close()
        self._wandb.finish(timeout_s=_WANDB_ABANDON_S)

    def _write_results(self) -> dict[str, str]:
        """Complete the files; label to path of those there are."""
        directory = self._directory
        self._metrics_file.close()
        paths = {"metrics": str(directory.metrics_path), "logs": str(directory.logs_path)}
        if self._points:
            write_learning_curve(directory.learning_curve_path, self._points, directory.name)
            paths["learning curve"] = str(directory.learning_curve_path)
        if self._cfg.wandb.mode is not WandbMode.disabled:
            paths["W&B files"] = str(directory.path / "wandb")
        return paths
