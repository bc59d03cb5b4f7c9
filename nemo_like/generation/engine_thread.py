"""``EngineThread``: the single thread on which an engine computes. All calls reach it through a queue.

    caller's thread      step thread
      call ──queue──▶      run commands, then work.advance(), again and again

With nothing to do the thread blocks on the queue. The thread also loads new weights, so that no step runs
with weights that are half loaded.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from nemo_like.cluster.breakdown import break_down, in_short, is_out_of_memory, is_own
from nemo_like.generation.interface import EngineOverdue, GenerationError

_T = TypeVar("_T")


class EngineWork(Protocol):
    """The work that the thread does between commands."""

    def advance(self) -> bool:
        """Do the next piece of work; return whether to go on at once, rather than wait for a command."""

    def patience_s(self) -> float | None:
        """Return how many seconds the thread may wait for a command; None: any number."""

    def fail(self, error: GenerationError, reason: str) -> None:
        """Forget unfinished work, and tell every caller who waits for it that the engine failed."""


@dataclass(frozen=True, slots=True)
class _Command:
    run: Callable[[], Any]
    done: Future[Any]


class EngineThread:
    """Runs the calls of one engine, and its ``work`` once that is set, until the process ends."""

    work: EngineWork | None = None

    def __init__(self, name: str, timeout_s: float) -> None:
        """Start the thread of the engine ``name``. ``timeout_s`` is the deadline of every call."""
        self._name, self._timeout_s = name, timeout_s
        self._failure: str | None = None
        self._is_stopped = False
        self._num_processes = 0
        self._commands: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        threading.Thread(target=self._serve, name=f"{name}-step", daemon=True).start()

    def call(self, function: Callable[[], _T]) -> _T:
        """Run ``function`` on the thread and return its result.

        Raises the function's own error, GenerationError once the engine has failed, and EngineOverdue when
        the thread does not answer in time.
        """
        done: Future[_T] = Future()
        self._commands.put(_Command(function, done))
        try:
            return done.result(self._timeout_s)
        except TimeoutError:
            message = f"engine {self._name!r} did not answer within {self._timeout_s:g} s"
            raise EngineOverdue(message, [self._name]) from None

    def stop(self) -> None:
        """End the thread after the command that calls this, since the engine did not start."""
        self._is_stopped = True

    def needs_processes(self) -> None:
        """Declare that the engine needs every worker process that exists now."""
        self._num_processes = len(multiprocessing.active_children())

    def fail(self, error: Exception, doing: str = "") -> GenerationError:
        """Let the work fail, and every later call raise; return the error that they raise.

        The stack goes to this process's log. An error of vLLM makes the process count as dead, so that it is
        replaced. An error of this project's checks does not, since it would come again. When a worker
        process is gone, end this process instead.
        """
        traceback.print_exception(error)
        if len(multiprocessing.active_children()) < self._num_processes:
            end_process()
        reason = f"{doing}{in_short(error)}"
        self._failure = f"engine {self._name!r} failed: {reason}"
        if doing or not is_own(error):
            break_down(error, doing)
        failed = GenerationError(self._failure)
        if self.work is not None:
            self.work.fail(failed, reason)
        return failed

    def _serve(self) -> None:
        goes_on = False
        while not self._is_stopped:
            self._run_commands(waits=not goes_on)
            goes_on = self._advance()

    def _run_commands(self, *, waits: bool) -> None:
        """Run all queued commands; with ``waits``, wait for a first command."""
        patience_s = None if self.work is None else self.work.patience_s()
        try:
            command = self._commands.get(block=waits, timeout=patience_s)
            while True:
                self._run(command)
                command = self._commands.get(block=False)
        except queue.Empty:
            pass

    def _run(self, command: _Command) -> None:
        if self._failure is not None:
            command.done.set_exception(GenerationError(self._failure))
            return
        try:
            command.done.set_result(command.run())
        except Exception as error:
            if is_out_of_memory(error) and self._failure is None and not self._is_stopped:
                self.fail(error)
            command.done.set_exception(error)

    def _advance(self) -> bool:
        if self.work is None or self._failure is not None:
            return False
        try:
            return self.work.advance()
        except Exception as error:
            self.fail(error)
            return False


def end_process() -> None:
    """End this process, whose engine has lost a worker and is no longer usable, so that it can be replaced.

    vLLM has written to the log which worker died.
    """
    os._exit(1)
