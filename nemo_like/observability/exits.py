"""How a process ended, in words."""

from __future__ import annotations

import signal


def how_it_ended(code: int) -> str:
    """Return the meaning of a return code as ``subprocess`` gives it: "exit code 3", or "signal SIGKILL" for
    one below 0."""
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
