"""Logs a run to console, files and metrics back ends through one interface."""

from __future__ import annotations

import re
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TextIO

from nemo_like.observability.background import BackgroundLogger, Recorder
from nemo_like.observability.console import make_console
from nemo_like.observability.disk import DiskFull, write_whole
from nemo_like.observability.events import EventKind, EventsFile
from nemo_like.observability.jsonl import MetricsFile, read_metrics
from nemo_like.observability.learning_curve import CurvePoints, write_learning_curve
from nemo_like.observability.logger_kind import LoggedRun
from nemo_like.observability.loggers import chosen_loggers
from nemo_like.observability.options import LoggerConfig
from nemo_like.observability.progress import RunProgress
from nemo_like.observability.run_directory import RunDirectory
from nemo_like.observability.summary import RunSummary, SampleAnswer, format_summary

# How long the user may wait for the back ends when a run finishes, and when it was cut short.
_FINISH_S = 10.0
_ABANDON_S = 3.0
_WANDB_RUN_ID = re.compile(r"[A-Za-z0-9_.-]{1,128}")

# Makes the recorder that writes a run's report; the caller that starts the run passes it.
MakeReport = Callable[[RunDirectory], Recorder]


class _SentSteps:
    """Remembers which steps the back ends have got.

    A run that goes back to a checkpoint repeats steps, but a back end keeps only one value per step.
    """

    def __init__(self) -> None:
        self._step = self._validation = -1

    def is_new_step(self, step: int) -> bool:
        """Return whether the metrics of this step were not sent yet, and count them as sent."""
        is_new, self._step = step > self._step, max(step, self._step)
        return is_new

    def is_new_validation(self, step: int) -> bool:
        """Return whether the validation after this step was not sent yet, and count it as sent."""
        is_new, self._validation = step > self._validation, max(step, self._validation)
        return is_new


class RunLogger:
    """Logs a run to everything that the configuration asks for.

    Metrics come with their final names (``train/reward``, ``timing/train/generation``, ...). Use it as a
    context manager, so that in any case the terminal is restored and the files are complete; ``finish``
    prints the summary.
    """

    def __init__(
        self,
        cfg: LoggerConfig,
        directory: RunDirectory,
        *,
        resolved_config: Mapping[str, Any],
        max_num_steps: int,
        wandb_run_id: str | None = None,
        report: MakeReport | None = None,
        stream: TextIO | None = None,
    ) -> None:
        """Open the metrics file and the console, and let the back ends start.

        ``report`` makes the recorder that writes the run's report, if ``logger.report`` asks for one.
        ``wandb_run_id`` is the W&B id in the checkpoint to continue; None takes the id of an earlier process
        in this directory, or else a new one. ``stream`` is where the user looks; None is standard output.
        """
        self._cfg = cfg
        self._directory = directory
        self._progress = RunProgress(max_num_steps)
        self._points = CurvePoints()
        self._sent = _SentSteps()
        earlier = self._earlier_wandb_run_id()
        has_id = earlier is None or _WANDB_RUN_ID.fullmatch(earlier) is not None
        self.wandb_run_id = wandb_run_id or (earlier if has_id else None) or uuid.uuid4().hex[:8]
        self._loggers = list(chosen_loggers(cfg))
        if any(one.kind.continues for one in self._loggers):
            write_whole(directory.wandb_run_id_path, self.wandb_run_id.encode(), "the W&B run's id")
        self._run = LoggedRun(directory, self.wandb_run_id, max_num_steps, resolved_config)
        self._backends = list(self._start_backends(report))
        self._metrics_file = MetricsFile(directory.metrics_path)
        self._events = EventsFile(directory.events_path)
        self._console = make_console(cfg.console, stream or sys.stdout, directory.name, self._progress)
        if not has_id:
            self.warn(
                f"{directory.wandb_run_id_path} held no id of a W&B run, so this run has a new one there"
            )

    def __enter__(self) -> RunLogger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def continue_after(self, step: int) -> None:
        """Go back to the state after ``step``: remove later steps from the metrics file."""
        self._metrics_file.rewind(step, self.warn)
        self._points = CurvePoints()
        self._progress.forget()
        for record in read_metrics(self._directory.metrics_path):
            self._recall(record)

    def status(self, text: str) -> None:
        """Show what the run is doing outside of steps, such as "starting 2 vLLM engines"."""
        self._console.status(text)
        self._events.write(EventKind.status, text)

    def refresh_status(self, text: str) -> None:
        """Show what the run is doing on a live view only, without a line or an event."""
        self._progress.status = text

    def warn(self, text: str) -> None:
        """Print a warning that the user should not miss."""
        self.note(f"warning: {text}")

    def note(self, text: str) -> None:
        """Print a line that stays on the screen, such as how many records were left out."""
        self._console.note(text)
        self._events.write(EventKind.note, text)

    def log_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log the metrics of a step; steps are counted from 1."""
        self._metrics_file.write(step, metrics)
        if self._sent.is_new_step(step):
            for backend in self._backends:
                backend.log(step, metrics)
        if "train/reward" in metrics:
            self._points.rewards.append((step, metrics["train/reward"]))
        self._console.step(step, metrics)

    def log_validation(
        self, step: int, metrics: Mapping[str, float], sample_answers: Sequence[SampleAnswer] = ()
    ) -> None:
        """Log the metrics of the validation after ``step`` (0: before the first step), and a few answers."""
        self._metrics_file.write(step, metrics)
        if self._sent.is_new_validation(step):
            for backend in self._backends:
                backend.log(step, metrics)
                if sample_answers:
                    backend.log_answers(step, sample_answers)
        if "validation/accuracy" in metrics:
            self._points.accuracies.append((step, metrics["validation/accuracy"]))
        self._console.validation(step, metrics)

    def flush(self, step: int) -> None:
        """Write ``step``, the latest, to the metrics file; call it once all its metrics are known."""
        self._metrics_file.flush()
        self._events.write(EventKind.step, step=step)

    def finish(self, summary: RunSummary) -> bool:
        """Write everything and print the summary, whose last line is ``run_dir: PATH``.

        Returns whether the metrics file and the learning curve are on disk. Warnings say which of them is
        not, and what went wrong in the back ends, which does not change the result.
        """
        self.status("writing the results")
        unwritten = self._write_results()
        # Before the back ends end: the report says how the run ended.
        self._events.write(EventKind.ended, summary.outcome, exit_code=summary.exit_code)
        problems = self._finish_backends(_FINISH_S)
        self._console.close()
        for line in format_summary(summary, self._progress, self._result_paths()):
            self._console.note(line)
        for problem in (*unwritten, *problems):
            self.warn(problem)
        if self._events.problem:
            self._console.note(f"warning: {self._events.problem}")
        self._console.note(f"run_dir: {self._directory.path}")
        return not unwritten

    def abandon(self, text: str) -> None:
        """End without results, since another run took the directory. ``text`` is the last line printed."""
        self._console.close()
        self._metrics_file.abandon()
        self._console.note(text)

    def last_words(self, outcome: str) -> None:
        """Complete the files and say how the run ended, when it cannot print its summary.

        The last line is ``run_dir: PATH``. Another thread than the run's may call this.
        """
        self._events.write(EventKind.ended, outcome)
        self.close()
        self._console.note(f"The run {outcome}.")
        self._console.note(f"run_dir: {self._directory.path}")

    def close(self) -> None:
        """Restore the terminal and complete the files; safe to call after ``finish``, and twice."""
        self._console.close()
        self._metrics_file.close()
        self._finish_backends(_ABANDON_S)

    def _start_backends(self, report: MakeReport | None) -> Iterator[BackgroundLogger]:
        if self._cfg.report and report is not None:
            yield BackgroundLogger("the report", lambda: report(self._directory))
        yield from (one.start(self._run) for one in self._loggers)

    def _earlier_wandb_run_id(self) -> str | None:
        """Return the W&B id that an earlier process wrote into this directory; None when there is none."""
        path = self._directory.wandb_run_id_path
        if not path.is_file():
            return None
        return path.read_text(encoding="utf-8", errors="replace").strip() or None

    def _finish_backends(self, timeout_s: float) -> list[str]:
        """Close all back ends, wait for them about ``timeout_s`` in total, and return what went wrong."""
        for backend in self._backends:
            backend.end()
        deadline_s = time.monotonic() + timeout_s
        problems = [
            backend.finish(timeout_s=max(0.0, deadline_s - time.monotonic())) for backend in self._backends
        ]
        return [problem for problem in problems if problem]

    def _recall(self, record: dict[str, Any]) -> None:
        """Count a step that is read from the metrics file, for the learning curve and the summary."""
        step = record["step"]
        if (reward := record.get("train/reward")) is not None:
            self._points.rewards.append((step, reward))
        if (accuracy := record.get("validation/accuracy")) is not None:
            self._points.accuracies.append((step, accuracy))
        self._progress.recall(step, record)

    def _write_results(self) -> list[str]:
        """Complete the metrics file, draw the learning curve, and return what went wrong."""
        problems = []
        for write in (self._metrics_file.close, self._draw_learning_curve):
            try:
                write()
            except (DiskFull, OSError) as error:
                problems.append(str(error))
        return problems

    def _draw_learning_curve(self) -> None:
        if self._points and not self._progress.is_evaluation:
            write_learning_curve(self._directory.learning_curve_path, self._points, self._directory.name)

    def _result_paths(self) -> dict[str, str]:
        """Return the place of each result of the run, by its label in the summary."""
        results = {label: str(path) for label, path in self._directory.outputs().items()}
        for one in self._loggers:
            results |= one.results(self._run)
        return results
