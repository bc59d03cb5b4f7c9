"""A moment until which several calls together may take."""

from __future__ import annotations

import time


class Deadline:
    def __init__(self, timeout_s: float) -> None:
        self._end = time.monotonic() + timeout_s

    def remaining(self) -> float:
        """Seconds left; a little where there are none, so that what is ready already is still seen."""
        return max(0.001, self._end - time.monotonic())
