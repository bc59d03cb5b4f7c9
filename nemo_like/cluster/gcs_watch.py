"""Whether Ray's control process (gcs_server) lives. Where it does not, a call of Ray's that needs it cannot
be interrupted, and after a minute ends its process without a word.

    gcs_server is killed, or stopped for long ──▶ a thread notices
      the driver waits for an actor: its wait raises ``RayDied``
      the driver is inside such a call: last words, and the end of the process
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

import psutil

_PERIOD_S = 0.5
# A process that somebody stopped, or a debugger, may go on.
_STOPPED_S = 30.0
# Less than Ray's minute, and more than the driver takes to end every process.
_UNHEARD_S = 45.0
_EXIT_CODE = 1


class GcsWatch:
    """Looks at the process until ``close``."""

    def __init__(self, gcs: psutil.Process, last_words: Callable[[str], None]) -> None:
        """``last_words`` gets the reason before this process ends because nobody else heard of it."""
        self._gcs, self._last_words = gcs, last_words
        self._failure: str | None = None
        self._is_closed = threading.Event()
        threading.Thread(target=self._look, name="gcs-watch", daemon=True).start()

    def failure(self) -> str | None:
        """Return why Ray is of no more use; None while its control process lives."""
        return self._failure

    def end_stopped(self) -> None:
        """Kill it if it is stopped: nobody who asks it for something would get an answer."""
        if _status(self._gcs) == psutil.STATUS_STOPPED:
            self._gcs.kill()

    def close(self) -> None:
        """Look no longer."""
        self._is_closed.set()

    def _look(self) -> None:
        what, stopped_since = "died", None
        while (status := _status(self._gcs)) is not None:
            if status != psutil.STATUS_STOPPED:
                stopped_since = None
            elif stopped_since is None:
                stopped_since = time.monotonic()
            elif time.monotonic() - stopped_since >= _STOPPED_S:
                what = f"was stopped for {_STOPPED_S:g} s"
                self.end_stopped()
                break
            if self._is_closed.wait(_PERIOD_S):
                return
        self._failure = f"Ray's control process (gcs_server) {what}"
        if not self._is_closed.wait(_UNHEARD_S):
            self._last_words(self._failure)
            os._exit(_EXIT_CODE)


def _status(process: psutil.Process) -> str | None:
    """None once it has ended, whether or not its parent has noticed."""
    try:
        status = process.status()
    except psutil.NoSuchProcess:
        return None
    return None if status == psutil.STATUS_ZOMBIE else str(status)
