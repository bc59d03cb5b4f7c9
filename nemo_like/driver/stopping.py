"""Signals that end a run, and reasons to save and stop before the last step.

A scheduler that takes the machine back says so with SIGTERM or SIGUSR1, some seconds to minutes
ahead; Slurm also tells a job when it will end. The step in progress is finished first.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from nemo_like.config.schema import CheckpointingConfig
from nemo_like.config.units import parse_duration_s

_SLURM_END_TIME = "SLURM_JOB_END_TIME"  # seconds since 1970, set by Slurm 22.05 and newer


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """A polite kill ends what runs in this block the way Ctrl-C does."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


def ignore_first_interrupt() -> None:
    """From now on the first SIGINT or SIGTERM changes nothing, since all is done; a second one ends what
    keeps this process from its end."""

    def ignore(signum: int, frame: FrameType | None) -> None:
        signal.signal(signum, signal.SIG_DFL)

    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, ignore)


class StopRequests:
    """Collects them; the driver asks after every step."""

    def __init__(
        self,
        cfg: CheckpointingConfig,
        *,
        environment: Mapping[str, str] = os.environ,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """``checkpoint_must_save_by`` counts from now."""
        self._is_enabled = cfg.enabled
        self._clock = clock
        self._deadlines: dict[str, float] = {}
        if cfg.checkpoint_must_save_by is not None:
            deadline = clock() + parse_duration_s(cfg.checkpoint_must_save_by)
            self._deadlines[f"checkpointing.checkpoint_must_save_by={cfg.checkpoint_must_save_by}"] = deadline
        if _SLURM_END_TIME in environment:
            self._deadlines["the end of the Slurm job"] = float(environment[_SLURM_END_TIME])
        self._signal: str | None = None

    @contextmanager
    def listening(self) -> Iterator[None]:
        """SIGUSR1 and the first SIGTERM ask for a stop; a second SIGTERM interrupts like Ctrl-C.

        Without checkpoints there is nothing to wait for, and signals stay what they are.
        """
        if not self._is_enabled:
            yield
            return

        def request(signum: int, frame: FrameType | None) -> None:
            if signum == signal.SIGTERM and self._signal is not None:
                raise KeyboardInterrupt
            self._signal = signal.Signals(signum).name

        previous = {signum: signal.signal(signum, request) for signum in (signal.SIGTERM, signal.SIGUSR1)}
        try:
            yield
        finally:
            for signum, handler in previous.items():
                signal.signal(signum, handler)

    def reason(self, next_step_s: float) -> str | None:
        """Why to stop now, given how long another step with its checkpoint would take; None to go on."""
        if not self._is_enabled:
            return None
        if self._signal is not None:
            return f"received {self._signal}"
        for name, deadline in self._deadlines.items():
            if self._clock() + next_step_s > deadline:
                return f"another step may not be over before {name}"
        return None
