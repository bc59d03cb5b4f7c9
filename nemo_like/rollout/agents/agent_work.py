"""Runs the work of requests in threads beside the event loop, so that no request holds up others.

small requests ──▶ one thread          a large one waits for large ones alone
large requests ──▶ another thread      one that takes too long is given up
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

from nemo_like.rollout.agents.agent_request import BadRequest

_T = TypeVar("_T")

_SMALL_BYTES = 2**18  # some 60,000 tokens, which take a tenth of a second
_MAX_CPU_S = 20.0
_CALLS_PER_LOOK = 251  # at the clock
_TEMPLATE = "<template>"  # the file name that Jinja gives compiled templates
_OWN_FILES = str(Path(__file__).parents[1])


class RequestWork:
    """Two threads for the work of requests: one for small requests, one for large ones. Use it on one event
    loop only."""

    def __init__(self, max_cpu_s: float = _MAX_CPU_S) -> None:
        """Start no thread yet. Each piece of work may take ``max_cpu_s`` seconds of processor time; time
        during which the machine runs other processes does not count."""
        self._max_cpu_s = max_cpu_s
        self._small = ThreadPoolExecutor(1, "agents-small")
        self._large = ThreadPoolExecutor(1, "agents-large")

    async def run(self, num_bytes: int, work: Callable[..., _T], *args: Any) -> _T:
        """Run ``work(*args)`` in a thread and return its result; ``num_bytes`` is how much it reads or
        writes.

        Raises what ``work`` raises, and BadRequest when it takes too long.
        """
        thread = self._small if num_bytes <= _SMALL_BYTES else self._large
        limited = partial(_within, self._max_cpu_s, work, *args)
        return await asyncio.get_running_loop().run_in_executor(thread, limited)

    def close(self) -> None:
        """End each thread after its current work."""
        for thread in (self._small, self._large):
            thread.shutdown(wait=False, cancel_futures=True)


class _OutOfTime(BaseException):
    """Work took too long. It is no Exception, so that code in between does not take it for an error of a
    template."""


def _within(max_cpu_s: float, work: Callable[..., _T], *args: Any) -> _T:
    """Run the work in this thread, for ``max_cpu_s`` seconds of processor time at most.

    A thread cannot be ended from outside. Python calls the function given to ``sys.setprofile`` at every call
    in this thread, so also in every loop of a template, and an error that the function raises ends the work.
    """
    end, num_calls, is_over = time.thread_time() + max_cpu_s, 0, False

    def look_at_the_clock(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal num_calls, is_over
        num_calls += 1
        if num_calls % _CALLS_PER_LOOK == 0:
            is_over = time.thread_time() > end
        if is_over and _may_stop(frame):
            raise _OutOfTime

    sys.setprofile(look_at_the_clock)
    try:
        return work(*args)
    except _OutOfTime:
        raise BadRequest(
            f"to read and render the request takes more than {max_cpu_s:g} s of a processor's time; send less"
        ) from None
    finally:
        sys.setprofile(None)


def _may_stop(frame: FrameType) -> bool:
    """Return whether work may be ended at a call in this frame: only while a template or this package runs.
    Other code may hold a lock that it could not release."""
    caller = frame.f_back
    if caller is not None and caller.f_code.co_filename == _TEMPLATE:
        return True
    file = frame.f_code.co_filename
    return file == _TEMPLATE or (file.startswith(_OWN_FILES) and file != __file__)
