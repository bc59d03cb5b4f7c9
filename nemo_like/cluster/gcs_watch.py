"""A watch on Ray's control process (gcs_server), which ends the driver with an explanation when it is gone.

A Ray call that needs a dead gcs_server cannot be interrupted. After a minute Ray ends the caller's process
without a message.

    gcs_server is killed, or stopped for long ──▶ a thread notices
      the driver waits for an actor: its wait raises ``RayDied``
      the driver is inside such a call: the thread prints the reason and ends the process
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable

import psutil

_PERIOD_S = 0.5
# How long gcs_server may be stopped before it counts as dead: whoever stopped it, or a debugger, may let it
# go on.
_STOPPED_S = 30.0
# How long the driver has to notice the failure and end every process itself; less than Ray's minute.
_UNHEARD_S = 45.0
_EXIT_CODE = 1


class GcsWatch:
    """A thread that looks at gcs_server until ``close``."""

    def __init__(self, gcs: psutil.Process, last_words: Callable[[str], None]) -> None:
        """Start the thread. It calls ``last_words`` with the reason before it ends this process.

        It ends the process only when the watch is still open some time after the failure.
        """
        self._gcs, self._last_words = gcs, last_words
        self._failure: str | None = None
        self._is_closed = threading.Event()
        threading.Thread(target=self._watch, name="gcs-watch", daemon=True).start()

    def failure(self) -> str | None:
        """Return why Ray is no longer usable; None while its control process lives."""
        return self._failure

    def end_stopped(self) -> None:
        """Kill gcs_server if it is stopped, since a stopped one leaves every request without an answer."""
        if _status(self._gcs) == psutil.STATUS_STOPPED:
            self._gcs.kill()

    def close(self) -> None:
        """Stop looking. A failure, noticed before or not, then no longer ends this process."""
        self._is_closed.set()

    def _watch(self) -> None:
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
            # Such an exit writes nothing out that was printed to a pipe or a file.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(_EXIT_CODE)


def _status(process: psutil.Process) -> str | None:
    """Return the process's status, or None once it has ended, whether or not its parent has noticed."""
    try:
        status = process.status()
    except psutil.NoSuchProcess:
        return None
    return None if status == psutil.STATUS_ZOMBIE else str(status)
