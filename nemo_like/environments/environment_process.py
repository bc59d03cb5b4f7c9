"""Runs an environment's code: in a child process that can be replaced, or, if harmless, in this process.

We do not use pebble's ``ProcessPool``. It keeps deadlines too, but gives a process one call at a time: 16
calls that wait for 0.2 s take 3.4 s instead of 0.3. And with pebble, a process that a reward started in its
own session outlives the deadline and the pool, and a busy process outlives a killed server.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Protocol

from nemo_like.batch.columns import Column
from nemo_like.child_process.parent_side import CallRaised, Child, ChildFailed, own_environment
from nemo_like.environments.interface import Feedback, Turn
from nemo_like.environments.options import EnvConfig
from nemo_like.environments.registry import build_environment, kind_of, written_columns


class Worker(Protocol):
    """Runs one environment; calls may interleave.

    ``columns`` are the columns that its feedback may bring; the caller checks that the feedback's values fit
    them.
    """

    columns: tuple[Column, ...]

    @property
    def is_alive(self) -> bool: ...

    async def step(self, turns: Sequence[Turn], timeout_s: float) -> Sequence[Feedback]:
        """Return one feedback per turn. Raises TimeoutError, CallRaised or ChildDied."""

    async def close(self) -> None:
        """End the worker with all processes that it started, and return once they are gone.

        Calls under way and later calls raise ChildDied.
        """


async def start_worker(cfg: EnvConfig) -> Worker:
    """Start a worker and return it once it is ready. Raises RuntimeError when the environment cannot be
    built."""
    if kind_of(cfg).is_harmless:
        return _SameProcessWorker(cfg)
    worker = ProcessWorker()
    await worker.start(cfg)
    return worker


class _SameProcessWorker:
    """Runs a harmless environment on the server's own event loop."""

    is_alive = True

    def __init__(self, cfg: EnvConfig) -> None:
        self._environment = build_environment(cfg)
        self.columns = written_columns(self._environment)

    async def step(self, turns: Sequence[Turn], timeout_s: float) -> Sequence[Feedback]:
        try:
            answers = await asyncio.wait_for(self._environment.step(turns), timeout_s)
            if len(answers) != len(turns):
                raise ValueError(f"the environment gave {len(answers)} answers to {len(turns)} turns")
            return answers
        except TimeoutError:
            raise
        except Exception as error:
            raise CallRaised(f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """Do nothing, since no process was started."""


class ProcessWorker:
    """The parent's side of ``environment_main``, whose ``guardian`` ends all processes that the environment
    started."""

    def __init__(self) -> None:
        self._child: Child
        self.columns: tuple[Column, ...] = ()

    async def start(self, cfg: EnvConfig) -> None:
        """Start the process and wait until its environment is built.

        Raises RuntimeError when the process does not start or the environment cannot be built.
        """
        try:
            self._child = Child(
                [sys.executable, "-m", "nemo_like.environments.environment_main"], own_environment()
            )
        except OSError as error:
            raise RuntimeError(f"kind={cfg.kind}: no process could be started: {error}") from error
        try:
            self.columns = await self._child.call(cfg, timeout_s=kind_of(cfg).start_timeout_s).returned()
        except ChildFailed as error:
            await self.close()
            raise RuntimeError(f"kind={cfg.kind}: {error}") from error

    @property
    def is_alive(self) -> bool:
        return self._child.is_alive

    async def step(self, turns: Sequence[Turn], timeout_s: float) -> Sequence[Feedback]:
        return await self._child.call(turns, timeout_s=timeout_s).returned()

    async def close(self) -> None:
        # The guardian ends all processes that the environment started, unless it was stopped itself.
        await asyncio.to_thread(self._child.close)
