"""Says in words how a process ended."""

from __future__ import annotations

import signal


def how_it_ended(code: int) -> str:
    """Return the meaning of a return code of ``subprocess``: "exit code 3", or for -9 "signal SIGKILL"."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
