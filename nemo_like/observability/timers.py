"""Timers for named stages and for the passes of a loop, in seconds of wall time."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from nemo_like.observability.trace import span


class StageTimer:
    """Measures the seconds of stages: ``with timer("generation"): ...``.

    The times of a stage that is entered several times add up. Stages may nest.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, stage: str) -> Iterator[None]:
        """Time the ``with`` block as ``stage``, even when it raises."""
        started_s = self._clock()
        try:
            with span(stage):
                yield
        finally:
            self.add(stage, self._clock() - started_s)

    def add(self, stage: str, seconds: float) -> None:
        """Add seconds that were measured elsewhere to a stage."""
        self._seconds[stage] = self._seconds.get(stage, 0.0) + seconds

    def metrics(self, prefix: str = "timing/train/") -> dict[str, float]:
        """Return the seconds per stage under ``prefix``, in the order in which the stages first ended."""
        return {f"{prefix}{stage}": seconds for stage, seconds in self._seconds.items()}


class SlowestPass:
    """Measures the longest pass of a loop: put ``with timer: ...`` around each pass.

    ``slowest_s`` is the length of the longest pass in seconds, and 0 before the first pass has ended.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.slowest_s = 0.0

    def __enter__(self) -> None:
        self._started_s = self._clock()

    def __exit__(self, *error: object) -> None:
        self.slowest_s = max(self.slowest_s, self._clock() - self._started_s)
