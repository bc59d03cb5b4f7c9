"""Shows during a long start which processes have not answered yet, and for how long the run has waited."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from nemo_like.observability.logger import RunLogger

_FROM_S = 10.0
_LINE_PERIOD_S = 15.0
_SHOWN_NAMES = 6


class StartStatus:
    """Shows statuses of a wait: a live view gets each of them, other output a line from time to time."""

    def __init__(self, logger: RunLogger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger, self._clock = logger, clock
        self._next_line = clock()

    def show(self, names: Sequence[str], seconds: float) -> None:
        """Show that the run has waited ``seconds`` for these processes, if that is long."""
        if seconds < _FROM_S:
            return
        more = len(names) - _SHOWN_NAMES
        shown = ", ".join(names[:_SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")
        text, now = f"waiting for {shown} ({seconds:.0f} s)", self._clock()
        if now < self._next_line:
            self._logger.refresh_status(text)
            return
        self._next_line = now + _LINE_PERIOD_S
        self._logger.status(text)
