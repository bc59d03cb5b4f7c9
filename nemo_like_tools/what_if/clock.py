"""A clock that jumps from event to event, and the processes that wait on it. Standard library only.

A process is a generator: it yields a number to wait that many seconds, or a ``Signal`` to wait until it is
fired. Events at the same time happen in the order in which they were scheduled.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Generator
from functools import partial
from itertools import count
from typing import Union

Process = Generator[Union[float, "Signal"], None, None]


class Clock:
    """Runs scheduled actions in the order of time. ``now_s`` begins at 0."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Schedule ``action`` for ``time_s``. Raises ValueError when that time has passed."""
        if time_s < self.now_s:
            raise ValueError(f"{time_s} s has passed at {self.now_s} s")
        heapq.heappush(self._events, (time_s, next(self._numbers), action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Schedule ``action`` for ``seconds`` from now."""
        self.at(self.now_s + seconds, action)

    def start(self, process: Process) -> None:
        """Run a process, beginning now."""
        self._resume(process)

    def run(self) -> None:
        """Run all actions, and those that they schedule, until none is left."""
        while self._events:
            self.now_s, _, action = heapq.heappop(self._events)
            action()

    def _resume(self, process: Process) -> None:
        for wanted in process:
            if isinstance(wanted, Signal):
                if not wanted.is_fired:
                    wanted.waiting.append(partial(self._resume, process))
                    return
            elif wanted > 0:
                self.after(wanted, partial(self._resume, process))
                return


class Signal:
    """An event that happens once, and for which processes wait."""

    def __init__(self) -> None:
        self.is_fired = False
        self.waiting: list[Callable[[], None]] = []

    def fire(self) -> None:
        """Let every waiting process go on. Firing again does nothing."""
        self.is_fired = True
        waiting, self.waiting = self.waiting, []
        for go_on in waiting:
            go_on()
