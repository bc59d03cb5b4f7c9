"""Runs an environment's code: in a child process that can be replaced, or, if harmless, in this process.

The child process is our own. pebble's ``ProcessPool`` keeps deadlines too, but gives a process one call at a
time: 16 calls that wait for 0.2 s take 3.4 s instead of 0.3. And with pebble, a process that a reward started
in a session of its own outlives the deadline and the pool, and a busy process outlives a server that is
killed.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

from nemo_like.batch.columns import Column
from nemo_like.environments.frames import LENGTH_BYTES, CallRaised, Refused, frame
from nemo_like.environments.interface import Feedback, Turn
from nemo_like.environments.options import EnvConfig
from nemo_like.environments.registry import build_environment, kind_of, written_columns
from nemo_like.observability.caches import inductor_cache
from nemo_like.observability.exits import how_it_ended

# How long the guardian has to end everything that the environment started.
_END_TIMEOUT_S = 10.0


class RewardRaised(Exception):
    """The environment raised, or gave a wrong number of answers."""


class WorkerDied(Exception):
    """The process that was asked has ended."""


class Worker(Protocol):
    """Runs one environment; calls may interleave.

    ``columns`` are those that its feedback may bring; the caller checks that the feedback's values fit them.
    """

    columns: tuple[Column, ...]

    @property
    def is_alive(self) -> bool: ...

    async def step(self, turns: Sequence[Turn], timeout_s: float) -> Sequence[Feedback]:
        """Return one feedback per turn. Raises TimeoutError, RewardRaised or WorkerDied."""

    async def close(self) -> None:
        """End the worker with everything that it started, and return once it is gone.

        Calls under way and later ones raise WorkerDied.
        """


async def start_worker(cfg: EnvConfig) -> Worker:
    """Start a worker and return it once it is ready. Raises RuntimeError when it cannot be built."""
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
            raise RewardRaised(f"{type(error).__name__}: {error}") from error

    async def close(self) -> None:
        """Do nothing, since no process was started."""


class ProcessWorker:
    """The parent's side of ``environment_main``, whose ``guardian`` ends all that the environment started.

    Every call gets an id, by which its answer is found.
    """

    def __init__(self) -> None:
        self._process: asyncio.subprocess.Process
        self._reading: asyncio.Task[None]
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._call_ids = itertools.count()
        self._is_closed = False
        self.columns: tuple[Column, ...] = ()

    async def start(self, cfg: EnvConfig) -> None:
        """Start the process and wait until its environment is built.

        Raises RuntimeError when the process does not start or the environment cannot be built.
        """
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "nemo_like.environments.environment_main"),
                env={
                    **os.environ,
                    **inductor_cache(),
                    "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                },
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                start_new_session=True,
            )
        except OSError as error:
            raise RuntimeError(f"kind={cfg.kind}: no process could be started: {error}") from error
        try:
            self._send(cfg)
            answer = await asyncio.wait_for(self._receive(), kind_of(cfg).start_timeout_s)
        except (OSError, EOFError, TimeoutError) as error:
            await self.close()
            raise RuntimeError(
                f"kind={cfg.kind}: its process did not start: {type(error).__name__} {error}"
            ) from error
        if isinstance(answer, Refused):
            await self.close()
            raise RuntimeError(f"kind={cfg.kind}: {answer.message}")
        self.columns = answer.columns
        self._reading = asyncio.get_running_loop().create_task(self._read())

    @property
    def is_alive(self) -> bool:
        return not self._is_closed and not self._reading.done()

    async def step(self, turns: Sequence[Turn], timeout_s: float) -> Sequence[Feedback]:
        if not self.is_alive:
            raise WorkerDied
        call_id = next(self._call_ids)
        answered = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            self._send((call_id, turns))
            answer = await asyncio.wait_for(answered, timeout_s)
        finally:
            self._calls.pop(call_id, None)
        if isinstance(answer, CallRaised):
            raise RewardRaised(answer.message)
        return answer

    async def close(self) -> None:
        self._is_closed = True
        assert self._process.stdin is not None
        # Abort instead of close: the pipe closes at once, also when calls are waiting to be written.
        if not self._process.stdin.transport.is_closing():
            self._process.stdin.transport.abort()
        try:
            await asyncio.wait_for(self._process.wait(), _END_TIMEOUT_S)
        except TimeoutError:
            # The guardian did not finish: somebody stopped it, or what it kills cannot be killed.
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            await self._process.wait()

    def _send(self, content: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(frame(content))

    async def _receive(self) -> Any:
        """Read the process's next answer. Raises EOFError when the process has ended."""
        assert self._process.stdout is not None
        header = await self._process.stdout.readexactly(LENGTH_BYTES)
        return pickle.loads(await self._process.stdout.readexactly(int.from_bytes(header, "big")))

    async def _read(self) -> None:
        """Give each call its answer until the process ends; then fail the calls that are left."""
        try:
            while True:
                call_id, answer = await self._receive()
                if (answered := self._calls.get(call_id)) is not None and not answered.done():
                    answered.set_result(answer)
        except EOFError:
            why = how_it_ended(await self._process.wait())
        except Exception as error:
            why = f"its answer cannot be read: {type(error).__name__}: {error}"
        for answered in self._calls.values():
            if not answered.done():
                answered.set_exception(WorkerDied(why))
