"""Calls a function in a Python process of its own, so that what it imports or crashes stays there.

parent ── pickled (target, arguments) ──▶ stdin    child_main
       ◀── pickled Returned or Raised ─── stdout
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import IO, Any

from nemo_like.observability.caches import inductor_cache
from nemo_like.observability.exits import how_it_ended

_SHOWN_LINES = 3
_SHOWN_CHARACTERS = 500  # of each
_TAIL_BYTES = 1 << 16
_PIPE_GRACE_S = 1.0


class ChildFailed(Exception):
    """The function raised, or its process ended or missed its deadline; the message says which."""


class ChildIsLate(ChildFailed):
    """No answer came before the deadline."""


@dataclass(frozen=True, slots=True)
class Returned:
    """The child's answer when the function returned."""

    value: Any


@dataclass(frozen=True, slots=True)
class Raised:
    """The child's answer when the function raised."""

    message: str


class ChildCall:
    """A call that is under way in a new process.

    As a context manager, it kills the process and its process group when the block is left.
    """

    def __init__(self, function: Callable[..., Any], *arguments: Any, timeout_s: float) -> None:
        """Start ``function(*arguments)``; all of these must be picklable.

        What the function prints stays off the terminal.
        """
        self._timeout_s, self._end_s = timeout_s, time.monotonic() + timeout_s
        self._process = subprocess.Popen(
            [sys.executable, "-m", "nemo_like.preflight.child_main"],
            env={
                **os.environ,
                **inductor_cache(),
                "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
                # A check does not download what is only on the hub.
                "HF_HUB_OFFLINE": "1",
                "HF_DATASETS_OFFLINE": "1",
            },
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError), self._process.stdin as stdin:
            stdin.write(pickle.dumps((function, arguments)))
        self._process.stdin = None
        assert self._process.stderr is not None
        self._errors = _Tail(self._process.stderr)
        self._process.stderr = None

    def __enter__(self) -> ChildCall:
        return self

    def __exit__(self, *error: object) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def result(self) -> Any:
        """Wait for what the function returns, and return it.

        Raises ChildFailed when it raised or its process ended, ChildIsLate ``timeout_s`` after the start.
        """
        try:
            remaining_s = max(0.0, self._end_s - time.monotonic())
            answer, _ = self._process.communicate(timeout=remaining_s)
        except subprocess.TimeoutExpired:
            raise ChildIsLate(f"no answer within {self._timeout_s:g} s") from None
        if not answer:
            code = self._process.returncode
            raise ChildFailed(
                f"its process ended with {how_it_ended(code)}{_last_lines(self._errors.read())}"
            )
        outcome = pickle.loads(answer)
        if isinstance(outcome, Raised):
            raise ChildFailed(outcome.message)
        return outcome.value


class _Tail:
    """The end of what comes through a pipe; what comes before is read and forgotten."""

    def __init__(self, pipe: IO[bytes]) -> None:
        self._pipe, self._end = pipe, b""
        self._reading = threading.Thread(target=self._read, name="errors", daemon=True)
        self._reading.start()

    def read(self) -> bytes:
        """Wait for the pipe's end, briefly where something else still holds it, and return the tail."""
        self._reading.join(_PIPE_GRACE_S)
        return self._end

    def _read(self) -> None:
        with self._pipe:
            while chunk := os.read(self._pipe.fileno(), _TAIL_BYTES):
                self._end = (self._end + chunk)[-_TAIL_BYTES:]


def _last_lines(errors: bytes) -> str:
    lines = [
        line.strip()[:_SHOWN_CHARACTERS]
        for line in errors.decode(errors="replace").splitlines()
        if line.strip()
    ]
    return ": " + " | ".join(lines[-_SHOWN_LINES:]) if lines else ""
