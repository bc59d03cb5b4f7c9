"""Keeps a terminal from showing "^C", which would disturb a view that is redrawn in place."""

from __future__ import annotations

import os
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

_LOCAL_MODES = 3  # index in what tcgetattr returns


@contextmanager
def without_control_echo(stream: TextIO) -> Iterator[None]:
    """Let the terminal behind ``stream`` show nothing for Ctrl-C and other control characters in the block.

    Behind the last character of a full line a "^C" begins a new line, and the view would be redrawn a line
    too low. Nothing changes where ``stream`` is no terminal.
    """
    before = _set_control_echo(stream, 0)
    try:
        yield
    finally:
        if before is not None:
            _set_control_echo(stream, before)


def _set_control_echo(stream: TextIO, flag: int) -> int | None:
    """Turn the echo of control characters on (``flag`` is ECHOCTL) or off (0), and return the flag before.

    Return None where nothing changed: without a terminal, and where the foreground of the terminal belongs to
    another process, since the kernel would stop this process for such a change.
    """
    try:
        if not stream.isatty() or os.tcgetpgrp(stream.fileno()) != os.getpgrp():
            return None
        settings = termios.tcgetattr(stream.fileno())
        before: int = settings[_LOCAL_MODES] & termios.ECHOCTL
        settings[_LOCAL_MODES] = settings[_LOCAL_MODES] & ~termios.ECHOCTL | flag
        termios.tcsetattr(stream.fileno(), termios.TCSANOW, settings)
    except (OSError, termios.error):  # another session's terminal, or one that is gone
        return None
    return before
