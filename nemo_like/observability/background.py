"""Runs each metrics back end on a thread of its own, so that nothing it does can delay or end the run."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from typing import Protocol

from nemo_like.observability.summary import SampleAnswer

# How long to wait after ``give_up``: a back end notices at once that its processes have ended.
_GIVEN_UP_S = 2.0


class Recorder(Protocol):
    """A run in a metrics back end. One thread makes the recorder and makes all calls."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record metrics of a step; several calls may bring metrics of the same step."""

    def log_answers(self, step: int, answers: Sequence[SampleAnswer]) -> None:
        """Record a few answers of a validation, if the back end keeps texts."""

    def close(self) -> None:
        """Write everything that is not written yet."""


class BackgroundLogger:
    """Hands metrics to a recorder on a thread of its own; every call but ``finish`` returns at once.

    Importing and starting a back end takes seconds. The thread calls ``start``, which does both and returns
    the recorder, while the run's processes start.
    """

    def __init__(
        self, name: str, start: Callable[[], Recorder], give_up: Callable[[], None] = lambda: None
    ) -> None:
        """Begin to start the back end, which messages call ``name``.

        ``give_up`` is called when the back end does not finish in time. It must end whatever the back end
        waits for, which would also keep this process from exiting.
        """
        self._name, self._give_up = name, give_up
        self._tasks: queue.SimpleQueue[Callable[[Recorder], None] | None] = queue.SimpleQueue()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(start,), name=name, daemon=True)
        self._has_ended = self._has_waited = False
        self._thread.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Hand over a step's metrics."""
        values = dict(metrics)
        self._tasks.put(lambda recorder: recorder.log(step, values))

    def log_answers(self, step: int, answers: Sequence[SampleAnswer]) -> None:
        """Hand over a few answers of a validation."""
        kept = tuple(answers)
        self._tasks.put(lambda recorder: recorder.log_answers(step, kept))

    def end(self) -> None:
        """Let the back end close once it has recorded everything. Safe to call twice."""
        if not self._has_ended:
            self._has_ended = True
            self._tasks.put(None)

    def finish(self, *, timeout_s: float) -> str | None:
        """Let the back end close, and wait for it, but no longer than about ``timeout_s``.

        Returns a sentence on what went wrong, or None. Only the first call waits; later calls return None.
        """
        self.end()
        if self._has_waited:
            return None
        self._has_waited = True
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            with suppress(Exception):
                self._give_up()
            self._thread.join(_GIVEN_UP_S)
            return f"{self._name} did not finish within {timeout_s:.1f} s; the end of the run may lack there"
        return (
            None
            if self._error is None
            else f"{self._name} failed: {type(self._error).__name__}: {self._error}"
        )

    def _run(self, start: Callable[[], Recorder]) -> None:
        try:
            with closing(start()) as recorder:
                while (task := self._tasks.get()) is not None:
                    task(recorder)
        except Exception as error:
            self._error = error
