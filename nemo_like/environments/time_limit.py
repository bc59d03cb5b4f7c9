"""Limits the time of a program fairly, although other programs take the CPUs at the same time.

A program has ``timeout_s`` of CPU time, all of its processes together, and as much time by the clock. Time
in which it waits for a CPU that others use does not count, so that a busy machine does not make an answer
wrong. Such waiting has a limit too, after which nothing can be said about the program.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from nemo_like.environments.cpu_account import ControlGroup, ProcessTrees

_PERIOD_S = 0.05  # from one look at the processes to the next
_SLOW_PERIOD_S = 0.5  # the same where only the CPU time matters
# A longer period means that this process itself waited for a CPU.
_LONGEST_PERIOD_S = 3 * _PERIOD_S
# How many times the limit may pass by the clock.
PATIENCE = 10.0


class Starved(Exception):
    """A program was ended after waiting for a CPU most of its time; the message says how long."""


class TimeLimit:
    """Ends a block when the time of a program is over; see ``time_limit``."""

    def __init__(self, limit_s: float, deadline: asyncio.Timeout) -> None:
        self._limit_s, self._deadline = limit_s, deadline
        self._next_look: asyncio.TimerHandle | None = None
        self.cpu_s = self.passed_s = self.waited_s = 0.0

    @property
    def is_starved(self) -> bool:
        """Whether the program has not used up its own time, neither CPU time nor time by the clock without
        waiting."""
        return self.cpu_s < self._limit_s and self.passed_s - self.waited_s < self._limit_s

    def watch(self, process: int, group: ControlGroup | None, *helpers: int) -> None:
        """Begin to count the time of ``process``, the program, in ``group`` if there is one. The program may
        wait for the processes ``helpers``, whose CPU time does not count as the program's."""
        loop = asyncio.get_running_loop()
        own, all_of_them = ProcessTrees([process]), ProcessTrees([process, *helpers])
        began_s = before_s = loop.time()
        cpu_before_s = all_of_them.look().cpu_s

        def look() -> None:
            nonlocal before_s, cpu_before_s
            now_s, seen = loop.time(), all_of_them.look()
            period_s, used_s = now_s - before_s, max(0.0, seen.cpu_s - cpu_before_s)
            own_s = used_s if seen.is_waiting else max(used_s, _LONGEST_PERIOD_S)
            self.waited_s += max(0.0, period_s - own_s)
            before_s, cpu_before_s = now_s, seen.cpu_s
            self.cpu_s, self.passed_s = _cpu_s(own, group), now_s - began_s
            if not self.is_starved or self.passed_s > PATIENCE * self._limit_s:
                self._deadline.reschedule(now_s)
            else:
                self._next_look = loop.call_later(_PERIOD_S, look)

        self._next_look = loop.call_later(_PERIOD_S, look)

    def stop(self) -> None:
        if self._next_look is not None:
            self._next_look.cancel()


async def until_cpu_is_used_up(process: int, group: ControlGroup | None, limit_s: float) -> None:
    """Return once the process and all below it have used ``limit_s`` of CPU time together."""
    loop, own = asyncio.get_running_loop(), ProcessTrees([process])
    is_used_up: asyncio.Future[None] = loop.create_future()

    def look() -> None:
        if is_used_up.done():
            return
        if _cpu_s(own, group) >= limit_s:
            is_used_up.set_result(None)
        else:
            loop.call_later(_SLOW_PERIOD_S, look)

    look()
    await is_used_up


def _cpu_s(processes: ProcessTrees, group: ControlGroup | None) -> float:
    """Return the CPU time that a program has used, from its control group if there is one."""
    if group is not None:
        with suppress(OSError, KeyError, ValueError):
            return group.cpu_s()
    return processes.look().cpu_s


@asynccontextmanager
async def time_limit(limit_s: float) -> AsyncIterator[TimeLimit]:
    """Yield a limit, which counts from the call of its ``watch`` on.

    Raises TimeoutError when the program's time is over in the block, and Starved when it had to wait too long
    for CPUs.
    """
    limit: TimeLimit | None = None
    try:
        async with asyncio.timeout(None) as deadline:
            limit = TimeLimit(limit_s, deadline)
            try:
                yield limit
            finally:
                limit.stop()
    except TimeoutError:
        if limit is not None and limit.is_starved:
            raise Starved(
                f"it had {limit.cpu_s:.2f} s of CPU in {limit.passed_s:.1f} s, and waited for a CPU for "
                f"{limit.waited_s:.1f} s of them"
            ) from None
        raise
