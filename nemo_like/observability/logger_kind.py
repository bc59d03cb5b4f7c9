"""What is known of a logger, which keeps a run's metrics somewhere: one file for each describes it so.

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
    run_id: str  # one for all processes that make the run, one after the other
    max_num_steps: int
    resolved_config: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoggerKind:
    """A logger. Its functions get its keys as an instance of ``options``, and rules the full key of these.

    about: where it keeps the metrics.
    label: what messages call it; else its name in the configuration.
    options: the class of its keys.
    start: makes its recorder, on a thread of its own.
    is_on: returns whether its keys ask for it; None: always, as a user's own is that is named.
    place: the lowest comes first in ``logger``; a shipped logger has one.
    problems: yields which of its keys do not fit, or what package or credentials are missing.
    machine_problems: yields what keeps this machine from it; tried out.
    continues: a later process of the run continues there, by ``LoggedRun.run_id``, what an earlier one began.
    give_up: ends what the recorder waits for, when it does not end in time.
    results: returns where the metrics are, by what the summary calls that.
    names_in_sweep: returns values for its keys that show a sweep's jobs together, given the sweep's name and
        the job's; where a configuration sets the keys, its own values stay.
    """

    about: str
    options: type
    start: Callable[[Any, LoggedRun], Recorder]
    label: str = ""
    is_on: Callable[[Any], bool] | None = None
    place: int = 0
    problems: Callable[[str, Any], Iterator[Problem]] | None = None
    machine_problems: Callable[[str, Any], Iterator[Problem]] | None = None
    continues: bool = False
    give_up: Callable[[], None] = lambda: None
    results: Callable[[Any, LoggedRun], Mapping[str, str]] | None = None
    names_in_sweep: Callable[[str, str], Mapping[str, str]] | None = None
