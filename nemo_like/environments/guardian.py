"""Ends all processes that an environment's process started, once that process or the run is gone.

    server ── stdin ──▶ relay ──▶ guardian ──▶ worker ──▶ processes that rewards start
                        ◀── how the worker ended

The guardian adopts the processes that the worker's processes leave behind, also processes that began their
own session. It kills everything below it when the worker ends, or when the server's end of stdin is closed,
which also happens when the server is killed. The relay stands between server and guardian because Ray, when
it ends an actor, kills the actor's children by a signal that cannot be caught; the guardian is not a child of
the actor. Linux only.
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
    """Become the relay, and fork the guardian, which forks the worker; return in the worker alone.

    The worker leads its own session. Call this before any thread is started.
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
        os._exit(1)  # the guardian died before the worker had asked to be killed with it


def _guard(worker: int, woken: int) -> NoReturn:
    poller = select.poll()
    poller.register(woken, select.POLLIN)
    poller.register(_STDIN, 0)  # reports that it was closed, and nothing else
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
    """Return a descriptor that becomes readable whenever a child has ended."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    return reading


def _reap(worker: int) -> int | None:
    """Reap the children that have ended; return the worker's status if it is one of them, else None."""
    found = None
    with suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == worker:
                found = ended[1]
    return found


def _end_descendants() -> None:
    """Kill this process's children until there are none; it adopts the children of each killed process."""
    while True:
        for child in psutil.Process().children():
            with suppress(psutil.Error):
                child.kill()
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _end_like(status: int) -> NoReturn:
    """End this process with the same exit code or signal as another process, whose status ``os.waitpid``
    returned."""
    code = os.waitstatus_to_exitcode(status)
    if code >= 0:
        os._exit(code)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with suppress(OSError):
        signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
    os._exit(1)


def _leave_log() -> None:
    """Point standard error to /dev/null: a process that keeps the actor's log open there appears in its stack
    dumps."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), _STDERR)


def _process_control(option: int, value: int) -> None:
    """Call prctl(2). Raises OSError when it fails."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl")
