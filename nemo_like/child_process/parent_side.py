"""Starts a child process of Python and calls it, by the frames of ``child_side``.

A thread writes the calls and another reads the answers, so that neither side has to read before it can write,
and calls may be made from any thread or event loop.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from queue import SimpleQueue
from typing import IO, Any, BinaryIO

from nemo_like.child_process.child_side import PICKLE, FrameCodec, frame, next_frame
from nemo_like.observability.caches import inductor_cache
from nemo_like.observability.exits import how_it_ended

_SHOWN_LINES = 3
_SHOWN_CHARACTERS = 500  # of each
_TAIL_BYTES = 1 << 16
_PIPE_GRACE_S = 1.0
_GRACE_S = 10.0


class ChildFailed(Exception):
    """A call has no result; the message says why."""


class CallRaised(ChildFailed):
    """The call raised in the child, or its result could not be sent."""


class ChildIsLate(ChildFailed, TimeoutError):
    """No answer came before the deadline."""


class ChildDied(ChildFailed):
    """The child has ended, and answers no call any more; ``how`` is said after "ended with"."""

    def __init__(self, how: str) -> None:
        super().__init__(f"its process ended with {how}")
        self.how = how


def own_environment() -> dict[str, str]:
    """Return the environment variables for a child that imports what this process can import."""
    path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return {**os.environ, **inductor_cache(), "PYTHONPATH": path}


class ChildAnswer:
    """The answer that a call will get; its deadline is ``timeout_s`` after this object was made."""

    def __init__(self, answered: Future[Any], timeout_s: float | None) -> None:
        self._answered, self._timeout_s = answered, timeout_s
        self._end_s = None if timeout_s is None else time.monotonic() + timeout_s

    def result(self) -> Any:
        """Wait for the result of the call, and return it. Raises CallRaised, ChildDied or ChildIsLate."""
        try:
            return self._answered.result(self._remaining_s())
        except TimeoutError:
            raise self._late() from None

    async def returned(self) -> Any:
        """Return and raise the same as ``result``, without blocking the event loop."""
        try:
            return await asyncio.wait_for(asyncio.wrap_future(self._answered), self._remaining_s())
        except TimeoutError:
            raise self._late() from None

    def _remaining_s(self) -> float | None:
        return None if self._end_s is None else max(0.0, self._end_s - time.monotonic())

    def _late(self) -> ChildIsLate:
        return ChildIsLate(f"no answer within {self._timeout_s:g} s")


class Child:
    """A child process, which leads a session of its own, and the calls that wait for its answers."""

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        codec: FrameCodec = PICKLE,
        stderr: int | None = None,
    ) -> None:
        """Start the process. Raises OSError where that is not possible.

        With ``stderr=subprocess.PIPE``, ChildDied says the last lines that the child wrote to stderr.
        """
        self._codec, self._call_ids = codec, itertools.count()
        self._calls: dict[int, Future[Any]] = {}
        self._registering = threading.Lock()  # guards ``_calls`` and ``_died``, which change together
        self._died: ChildDied | None = None
        self._frames = SimpleQueue[bytes]()
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                self._process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=stderr,
                    start_new_session=True,
                )
            except OSError:
                ours.close()
                raise
        self._is_open, self._socket = True, ours
        self._errors = None if self._process.stderr is None else _Tail(self._process.stderr)
        self._process.stderr = None
        for run in (self._send, self._read):
            threading.Thread(target=run, name="child process", daemon=True).start()

    @property
    def is_alive(self) -> bool:
        """Whether calls can be answered: the process has not ended, and nobody has closed or killed it."""
        return self._is_open and self._died is None

    def call(self, *arguments: Any, timeout_s: float | None) -> ChildAnswer:
        """Send a call; ``timeout_s`` is None where a caller further up keeps the deadline."""
        answered, call_id = Future[Any](), next(self._call_ids)
        message = frame(self._codec.encode((call_id, arguments)))
        with self._registering:
            if self._died is None:
                self._calls[call_id] = answered
                self._frames.put(message)
            else:
                answered.set_exception(self._died)
        answered.add_done_callback(lambda _: self._calls.pop(call_id, None))
        return ChildAnswer(answered, timeout_s)

    def close(self, grace_s: float = _GRACE_S) -> None:
        """Close this end, upon which a child in ``serve`` exits by itself; kill it when it is still there
        after ``grace_s``. Calls under way and later calls raise ChildDied."""
        self._is_open = False
        # Shut down instead of close: calls that are waiting to be written are given up too.
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(grace_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kill the process and its process group, and return once it is gone."""
        self._is_open = False
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _send(self) -> None:
        with suppress(OSError):  # the end of its answers says that it ended
            while message := self._frames.get():
                self._socket.sendall(message)

    def _read(self) -> None:
        """Give each call its answer until the process ends; then fail the calls that are left."""
        try:
            with self._socket.makefile("rb") as answers:
                while True:
                    self._take(answers)
        except (EOFError, ConnectionError):
            last_words = "" if self._errors is None else self._errors.last_lines()
            how = how_it_ended(self._process.wait()) + last_words
        except Exception as error:
            how = f"an answer that cannot be read: {type(error).__name__}: {error}"
        with self._registering:
            self._died, left = ChildDied(how), list(self._calls.values())
        for answered in left:
            if answered.set_running_or_notify_cancel():
                answered.set_exception(self._died)
        self._frames.put(b"")
        self._socket.close()

    def _take(self, answers: BinaryIO) -> None:
        call_id, has_returned, content = self._codec.decode(next_frame(answers))
        answered = self._calls.get(call_id)
        # Nobody waits any more for the answer of a call that was cancelled.
        if answered is None or not answered.set_running_or_notify_cancel():
            return
        if has_returned:
            answered.set_result(content)
        else:
            answered.set_exception(CallRaised(content))


class _Tail:
    """Reads a pipe to its end and keeps only the last ``_TAIL_BYTES``."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe, self._end = pipe, b""
        self._reading = threading.Thread(target=self._read, name="errors", daemon=True)
        self._reading.start()

    def last_lines(self) -> str:
        """Wait for the pipe's end, at most ``_PIPE_GRACE_S``; return the last lines after a colon, or ""
        where nothing was written."""
        self._reading.join(_PIPE_GRACE_S)
        lines = [line.strip() for line in self._end.decode(errors="replace").splitlines()]
        shown = [line[:_SHOWN_CHARACTERS] for line in lines if line][-_SHOWN_LINES:]
        return ": " + " | ".join(shown) if shown else ""

    def _read(self) -> None:
        with self._pipe:
            while chunk := os.read(self._pipe.fileno(), _TAIL_BYTES):
                self._end = (self._end + chunk)[-_TAIL_BYTES:]
