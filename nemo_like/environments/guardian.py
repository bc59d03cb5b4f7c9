"""Ends everything that an environment's process started, once that process or the run is gone.

    server ── stdin ──▶ relay ──▶ guardian ──▶ worker ──▶ whatever rewards start
                        ◀── how the worker ended

The guardian adopts what the worker's processes leave behind, also what began a session of its own. When
the worker ends, or the server's end of stdin is closed, as that of a killed server is, it kills all that is
below it. The relay stands between because Ray, when it ends an actor, kills the actor's children by a signal
that nothing survives: the guardian is none of them. Linux only.
"""

from __future__ import annotations

import ctypes
import os
import resource
import select
import signal
from contextlib import suppress
from typing import NoReturn

import psutil

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_STDIN, _STDERR = 0, 2


def run_guarded() -> None:
    """Fork relay and guardian off, and return in the worker alone, which leads a session of its own.

    To be called before any thread is started.
    """
    guardian = os.fork()
    if guardian:
        _leave_log()
        _, status = os.waitpid(guardian, 0)
        _end_like(status)
    _process_control(_PR_SET_CHILD_SUBREAPER, 1)
    woken = _wake_up_at_ends_of_children()
    guardian, worker = os.getpid(), os.fork()
    if worker:
        _leave_log()
        _guard(worker, woken)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    _process_control(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guardian:
        os._exit(1)  # it died before the signal was agreed on


def _guard(worker: int, woken: int) -> NoReturn:
    poller = select.poll()
    poller.register(woken, select.POLLIN)
    poller.register(_STDIN, 0)  # nothing but its end
    status = None
    while status is None:
        ready = {descriptor for descriptor, _ in poller.poll()}
        if woken in ready:
            os.read(woken, select.PIPE_BUF)
            status = _reap(worker)
        elif _STDIN in ready:
            break
    _end_descendants()
    _end_like(status or 0)


def _wake_up_at_ends_of_children() -> int:
    """A descriptor that can be read whenever a child has ended."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    return reading


def _reap(worker: int) -> int | None:
    """Take notice of children that have ended; the worker's status if it is among them."""
    found = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == worker:
                found = ended[1]
    return found


def _end_descendants() -> None:
    """Kill the children until there are none: those of a killed one become children themselves."""
    while True:
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                child.kill()
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _end_like(status: int) -> NoReturn:
    """End this process as ``status``, of ``os.waitpid``, says that another one ended."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(1)


def _leave_log() -> None:
    """Give standard error up: processes that have the actor's log there are in its stack dumps."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), _STDERR)


def _process_control(option: int, value: int) -> None:
    """prctl(2). Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
