"""Writes ``report.html`` during a run, on a thread of its own."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from nemo_like.observability.run_directory import RunDirectory
from nemo_like.observability.summary import SampleAnswer
from nemo_like_tools.report.run_page import RunData, write_report

# Between two writes pass at least this many seconds, and this many times the seconds of the last write.
_PAUSE_S = 20.0
_PAUSE_FACTOR = 30.0


class ReportRecorder:
    """A ``Recorder`` that writes the page from the files of the run directory. A call only says that files
    have changed.

    It writes so seldom that it takes at most a thirtieth of one core.
    """

    def __init__(self, directory: RunDirectory, clock: Callable[[], float] = time.monotonic) -> None:
        self._path, self._clock = directory.report_path, clock
        self._run = RunData(directory.path)
        self._due_s = clock()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the page when it is due."""
        if self._clock() >= self._due_s:
            self._write()

    def log_answers(self, step: int, answers: Sequence[SampleAnswer]) -> None:
        """Do nothing: the page reads all answers from the dumped samples."""

    def close(self) -> None:
        self._write()

    def _write(self) -> None:
        started_s = self._clock()
        self._run.update()
        write_report(self._path, [self._run])
        took_s = self._clock() - started_s
        self._due_s = started_s + max(_PAUSE_S, _PAUSE_FACTOR * took_s)
