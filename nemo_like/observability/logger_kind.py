"""Describes a logger, which keeps a run's metrics somewhere; each logger is one file.

logger_kinds/tensorboard.py    KIND = LoggerKind(about=..., options=..., start=...)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from nemo_like.config.problems import Problem
from nemo_like.observability.background import Recorder
from nemo_like.observability.run_directory import RunDirectory


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """The run whose metrics a logger gets."""

    directory: RunDirectory
    run_id: str  # the same in all processes that make the run, one after the other
    max_num_steps: int
    resolved_config: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerKind:
    """A logger. Its functions get its keys as an instance of ``options``; its rules get the full key of these
    first.

    about: where it keeps the metrics.
    options: the class of its keys.
    start: makes its recorder, on a thread of its own.
    label: its name in messages; by default its name in the configuration.
    is_on: returns whether its keys ask for it; None: always, as for a user's own logger that is configured.
    position: where it stands in ``logger``; the lowest comes first. Only shipped loggers need one.
    problems: yields its wrong keys, and the packages or credentials that are missing.
    machine_problems: tries the logger, and yields what keeps this machine from using it.
    continues: whether a later process of the run continues an earlier one's record, by ``LoggedRun.run_id``.
    give_up: ends whatever the recorder waits for, when the recorder does not end in time.
    results: returns where the metrics are, by their label in the summary.
    names_in_sweep: returns values for its keys that show the jobs of a sweep together, given the names of the
        sweep and of the job; values that a configuration sets stay.
    """

    about: str
    options: type
    start: Callable[[Any, LoggedRun], Recorder]
    label: str = ""
    is_on: Callable[[Any], bool] | None = None
    position: int = 0
    problems: Callable[[str, Any], Iterator[Problem]] | None = None
    machine_problems: Callable[[str, Any], Iterator[Problem]] | None = None
    continues: bool = False
    give_up: Callable[[], None] = lambda: None
    results: Callable[[Any, LoggedRun], Mapping[str, str]] | None = None
    names_in_sweep: Callable[[str, str], Mapping[str, str]] | None = None
