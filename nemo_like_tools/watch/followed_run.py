"""Follows a run of another process by the files of its run directory, and shows what is new.

    config.yaml ── number of steps ──┐
    metrics.jsonl ── values ─────────┼──▶ FollowedRun.update ──▶ RunProgress, Console
    events.jsonl ── statuses, notes ─┤
    starts/ ── does it still run? ───┘

It only reads, so it works on any machine that sees the directory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from nemo_like.observability.console import Console, QuietConsole
from nemo_like.observability.events import Event, EventKind
from nemo_like.observability.jsonl import FollowedLines, is_metrics
from nemo_like.observability.progress import RunProgress, format_duration
from nemo_like.observability.run_directory import RunDirectory
from nemo_like.observability.run_lock import latest_start

# run_grpo.py's exit code for a run that failed, which stands for a run that died.
_DIED = 1
_REMEDY = "give the path that a run prints as run_dir"


class NoRunDirectory(ValueError):
    """A path is not a run directory. The message says what is there instead."""


@dataclass(frozen=True, slots=True)
class SeenEnd:
    """How a run ended. ``outcome`` completes the sentence "The run ..."."""

    outcome: str
    exit_code: int


def find_run(path: Path) -> RunDirectory:
    """Return the run directory at ``path``, or the one below it when ``path`` belongs to a Slurm job.

    Raises NoRunDirectory.
    """
    for directory in (path, path / "run"):
        if RunDirectory(directory).config_path.is_file():
            return RunDirectory(directory.absolute())
    if not path.is_dir():
        raise NoRunDirectory(f"{path} is no directory; {_REMEDY}")
    if (path / "nodes").is_dir():
        raise NoRunDirectory(
            f"{path} is of a Slurm job that has not begun its run yet; the job's slurm-JOBID.out says why"
        )
    below = sorted(RunDirectory(one).config_path for one in path.iterdir() if one.is_dir())
    runs = [str(config.parent) for config in below if config.is_file()]
    there = (
        f"there are runs in it: {', '.join(runs[-5:])}"
        if runs
        else "give the path that a run prints as run_dir"
    )
    raise NoRunDirectory(f"{path} is no run directory, as it has no config.yaml; {there}")


class FollowedRun:
    """The state of a run, read from its files by the latest ``update``."""

    def __init__(self, directory: RunDirectory, clock: Callable[[], float] = time.time) -> None:
        """Read the files of a run. ``clock`` returns seconds since 1970.

        Raises NoRunDirectory when config.yaml is not the configuration of a run, OSError when a file cannot
        be read.
        """
        self.directory = directory
        self._clock = clock
        self._events, self._metrics = (
            FollowedLines(directory.events_path),
            FollowedLines(directory.metrics_path),
        )
        self._step_times_s: dict[int, float] = {}
        self._notes: list[str] = []
        self._said = ""  # what the run does outside of steps
        self._ended: Event | None = None
        self._is_latest = False  # the events being read belong to the latest start
        self._start = latest_start(directory.path)
        self._at_s = clock() if self._start is None else self._start.began_s
        # Its clock shows the time of the event that is being read.
        self.progress = RunProgress(_max_num_steps(directory), clock=lambda: self._at_s)
        self._read(QuietConsole(self.progress), is_first=True)

    @property
    def process(self) -> str:
        """The process that makes the run, in words."""
        return "an unknown process" if self._start is None else self._start.process

    @property
    def notes(self) -> Sequence[str]:
        """The notes of the latest start, such as warnings."""
        return tuple(self._notes)

    @property
    def end(self) -> SeenEnd | None:
        """How the run ended, or that its process died; None while it runs."""
        start, logs = self._start, f"logs are in {self.directory.logs_path}"
        if start is None:
            return SeenEnd("left no sign of its start, so nobody knows whether it goes on", _DIED)
        if not start.is_over:
            return None
        if self._ended is not None:
            code = self._ended.exit_code
            return SeenEnd(self._ended.text, _DIED if code is None else code)
        if start.has_ended:
            return SeenEnd(f"ended without a word on how it went: its output has the reason; {logs}", _DIED)
        silence = format_duration(max(0.0, self._clock() - start.last_sign_s))
        died = f"died: {start.process} is gone, {silence} after its last sign of life, and left no last word"
        return SeenEnd(f"{died}; {logs}", _DIED)

    def update(self, console: Console) -> None:
        """Read what is new and pass it on to ``console``, which shows this object's ``progress``.

        Raises NoRunDirectory when the directory is gone, OSError when a file cannot be read.
        """
        if not self.directory.config_path.is_file():
            raise NoRunDirectory(f"{self.directory.path} is gone")
        began_s = self._began_s
        self._start = latest_start(self.directory.path) or self._start
        if self._began_s != began_s:
            self._is_latest, self._ended = False, None
        self._read(console, is_first=False)

    @property
    def _began_s(self) -> float:
        return 0.0 if self._start is None else self._start.began_s

    def _read(self, console: Console, *, is_first: bool) -> None:
        # Events first: a step's line is in metrics.jsonl before its event is written.
        events = [event for event in map(_event, self._events.new().values) if event is not None]
        self._step_times_s |= {event.step: event.time_s for event in events if event.step is not None}
        metrics = self._metrics.new()
        if metrics.is_replaced:
            self.progress.forget()
        for number, record in enumerate(filter(is_metrics, metrics.values), start=1):
            is_old = self._step_times_s.get(record["step"], 0.0) < self._began_s
            if metrics.is_replaced or (is_first and is_old and number < len(metrics.values)):
                self.progress.recall(record["step"], _numbers(record))
            else:
                self._show(record["step"], _numbers(record), console)
        for event in events:
            # Later events belong to the latest start too, even when its clock was set back.
            self._is_latest = self._is_latest or event.time_s >= self._began_s
            if self._is_latest:
                self._hear(event, console)
        is_over = self._start is not None and self._start.is_over
        self._at_s = self._start.last_sign_s if self._start and is_over else self._clock()
        self.progress.status = self._said or self._waited()

    def _waited(self) -> str:
        """Return how long ago the latest start ended its latest step, in words; empty without a step."""
        step = self.progress.step
        latest_s = self._step_times_s.get(step)
        if latest_s is None or latest_s < self._began_s:
            return ""
        return f"{format_duration(max(0.0, self._at_s - latest_s))} since step {step}"

    def _show(self, step: int, metrics: Mapping[str, float], console: Console) -> None:
        self._at_s = self._step_times_s.get(step, self._clock())
        if any(name.startswith("train/") for name in metrics):
            console.step(step, metrics)
        if any(name.startswith("validation/") for name in metrics):
            console.validation(step, metrics)

    def _hear(self, event: Event, console: Console) -> None:
        if event.kind is EventKind.status:
            self._said = event.text
            console.status(event.text)
        elif event.kind is EventKind.note:
            self._notes.append(event.text)
            console.note(event.text)
        elif event.kind is EventKind.step:
            self._said = ""
        else:
            self._ended = event


def _max_num_steps(directory: RunDirectory) -> int:
    try:
        config = yaml.safe_load(directory.config_path.read_text(encoding="utf-8"))
        return int(config["grpo"]["max_num_steps"])
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        raise NoRunDirectory(
            f"{directory.config_path} has no grpo.max_num_steps ({error!r}), as that of a run would"
        ) from error


def _event(value: Mapping[str, Any]) -> Event | None:
    try:
        return Event.from_json(value)
    except (KeyError, TypeError, ValueError):
        return None  # of another version


def _numbers(record: Mapping[str, float | None]) -> dict[str, float]:
    """Return the metrics of a line; null becomes NaN."""
    return {name: math.nan if value is None else value for name, value in record.items() if name != "step"}
