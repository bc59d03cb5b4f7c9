"""Metrics back ends, each on a thread of its own: nothing they do can hold up or end the run."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from typing import Protocol

from nemo_like.observability.summary import SampleAnswer

# A back end whose processes have ended notices at once.
_GIVEN_UP_S = 2.0


class Recorder(Protocol):
    """A run in a metrics back end; lives on one thread."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Metrics of a step; those of one step may come in several calls."""

    def log_answers(self, step: int, answers: Sequence[SampleAnswer]) -> None:
        """A few answers of a validation, where the back end has a place for texts."""

    def close(self) -> None:
        """Write out what is left."""


class BackgroundLogger:
    """Hands metrics to a recorder; every call but ``finish`` returns at once.

    Importing and starting a back end takes seconds: ``start`` does it on the thread, while the run's
    processes start.
    """

    def __init__(
        self, name: str, start: Callable[[], Recorder], give_up: Callable[[], None] = lambda: None
    ) -> None:
        """``name`` is what a person calls the back end. ``give_up`` ends what keeps it from finishing
        in time, and would keep this process from its end."""
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
        """Let the back end close as soon as it has everything. Safe to call twice."""
        if not self._has_ended:
            self._has_ended = True
            self._tasks.put(None)

    def finish(self, *, timeout_s: float) -> str | None:
        """End, and wait at most ``timeout_s`` for what is left to be written.

        Returns what went wrong, or None. Safe to call twice; only the first call waits.
        """
        self.end()
        if self._has_waited:
            return None
        self._has_waited = True
        self._thread.join(timeout_s)
        if self._thread.is_alive():
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
