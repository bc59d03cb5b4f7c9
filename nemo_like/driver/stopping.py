"""Signals that end a run, and reasons to save and stop it before its last step.

A user presses Ctrl-C, which is SIGINT. A scheduler that takes the machine back sends SIGTERM or SIGUSR1 some
seconds to minutes ahead; Slurm also tells a job when it will end. A program that started the run may ask for
a stop too. The run finishes the step in progress, saves, and stops.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from queue import SimpleQueue
from types import FrameType, MappingProxyType

from nemo_like.checkpoint.options import CheckpointingConfig
from nemo_like.config.units import parse_duration_s
from nemo_like.driver.run_failures import CallbackFailed

# Called after each step with its number, from 1, and its metrics by their final names.
OnStep = Callable[[int, Mapping[str, float]], object]

_REQUESTS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # SIGINT first
_PRINT_S = 1.0  # for a line on a terminal
_SLURM_END_TIME = "SLURM_JOB_END_TIME"  # seconds since 1970, set by Slurm 22.05 and newer


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Raise KeyboardInterrupt in the block on SIGTERM, as Ctrl-C does on SIGINT."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def ignore_first_interrupt() -> None:
    """Ignore the first SIGINT and the first SIGTERM from now on, since the run's work is done.

    A second signal of the same kind ends this process at once, in case it hangs at its exit.
    """

    def ignore(signum: int, frame: FrameType | None) -> None:
        signal.signal(signum, signal.SIG_DFL)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, ignore)


class StopRequests:
    """Collects signals, deadlines and the answers of ``on_step``; the driver asks after every step whether
    one of them is a reason to stop.

    ``by_callback`` says that ``on_step`` asked for the stop; None while it has not.
    """

    def __init__(
        self,
        cfg: CheckpointingConfig,
        on_step: OnStep | None = None,
        *,
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.time,
        stopwatch: Callable[[], float] = time.monotonic,
    ) -> None:
        """Note the deadlines: ``checkpointing.checkpoint_must_save_by`` from now, and the Slurm job's end.

        ``clock`` is in seconds since 1970, as Slurm gives the end; the machine's clock may be reset
        meanwhile. ``stopwatch`` measures the time from now, and is never reset.
        """
        self.by_callback: str | None = None
        self._on_step = on_step
        self._is_enabled = cfg.enabled
        self._deadlines: dict[str, tuple[Callable[[], float], float]] = {}  # each with its clock
        if (limit := cfg.checkpoint_must_save_by) is not None:
            deadline = stopwatch() + parse_duration_s(limit)
            self._deadlines[f"checkpointing.checkpoint_must_save_by={limit}"] = (stopwatch, deadline)
        if _SLURM_END_TIME in environment:
            self._deadlines["the end of the Slurm job"] = (clock, float(environment[_SLURM_END_TIME]))
        self._signal: signal.Signals | None = None

    @contextmanager
    def listening(self, note: Callable[[str], None]) -> Iterator[None]:
        """Take SIGINT, SIGTERM and SIGUSR1 inside the block as requests to stop after the step in progress.

        Another thread calls ``note`` with a line about the first request. A SIGINT or SIGTERM after it raises
        KeyboardInterrupt. A SIGINT that the process ignores stays ignored. Without checkpoints no step need
        be waited for, so the signals keep their handlers.
        """
        if not self._is_enabled:
            yield
            return

        # A handler may run in the middle of any line, also of one that prints, so it prints nothing itself.
        lines: SimpleQueue[str | None] = SimpleQueue()

        def request(signum: int, frame: FrameType | None) -> None:
            if self._signal is None:
                self._signal = signal.Signals(signum)
                lines.put(_what_follows(self._signal))
            elif signum != signal.SIGUSR1:
                raise KeyboardInterrupt

        printer = threading.Thread(target=_note_all, args=(lines, note), name="stop requests", daemon=True)
        printer.start()
        is_ignored = signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None)
        heeded = _REQUESTS[1:] if is_ignored else _REQUESTS
        previous = {signum: signal.signal(signum, request) for signum in heeded}
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)
            lines.put(None)
            printer.join(timeout=_PRINT_S)

    def after_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Call ``on_step`` after a step. A false answer other than None asks for a stop.

        Raises CallbackFailed when ``on_step`` raises.
        """
        if self._on_step is None:
            return
        try:
            answer = self._on_step(step, MappingProxyType(dict(metrics)))
        except Exception as error:
            reason = f"on_step raised {type(error).__name__} after step {step}: {error}"
            raise CallbackFailed(reason) from error
        if answer is not None and not answer:
            self.by_callback = f"on_step returned {answer} after step {step}"

    def reason(self, next_step_s: float) -> str | None:
        """Return why the run should stop now; None if there is time for another step of ``next_step_s``
        seconds.

        Without checkpoints only ``on_step`` gives a reason.
        """
        if self.by_callback is not None:
            return self.by_callback
        if not self._is_enabled:
            return None
        if self._signal is not None:
            return f"received {_named(self._signal)}"
        for name, (now, deadline) in self._deadlines.items():
            if now() + next_step_s > deadline:
                return f"another step may not be over before {name}"
        return None


def _named(signum: signal.Signals) -> str:
    return "SIGINT (Ctrl-C)" if signum == signal.SIGINT else signum.name


def _what_follows(signum: signal.Signals) -> str:
    """Return the line that answers the first request at once."""
    again = "a second Ctrl-C" if signum == signal.SIGINT else "Ctrl-C"
    return (
        f"received {_named(signum)}: finishing the step under way, then saving and stopping; {again} stops "
        "at once"
    )


def _note_all(lines: SimpleQueue[str | None], note: Callable[[str], None]) -> None:
    """Call ``note`` with each line, until None ends them."""
    while (line := lines.get()) is not None:
        note(line)
