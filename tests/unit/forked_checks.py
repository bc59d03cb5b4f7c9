"""Child processes of slow checks for unit tests: forks of a process that has imported what checks load.

    ForkedCall ──environment, descriptors──▶ server ──forks──▶ preflight.child, as ChildCall starts it
               ◀──process id, how it ended── server

Nearly all of a check's time is the import of torch and transformers. ``tests/unit/preflight/test_child.py``
starts real children, and so do the functional tests.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import IO, Any
from unittest import mock

from nemo_like.preflight import child
from nemo_like.preflight.child import ChildCall

IMPORTS = ("nemo_like.preflight.data_scan", "nemo_like.data.tokenizer")
START_TIMEOUT_S = 240.0  # for the imports, on a busy machine


class ForkedCall(ChildCall):
    """To be used in the place of ``ChildCall``."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, timeout_s: float) -> None:
        server()  # which is started by the real one
        with mock.patch.object(subprocess, "Popen", Fork):
            super().__init__(function, *arguments, timeout_s=timeout_s)


class Fork:
    """What a ``Child`` needs of a ``subprocess.Popen``, for a fork of the server."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int,
        stdout: int,
        stderr: int,
        start_new_session: bool,
    ) -> None:
        assert list(command) == [sys.executable, "-m", child.__name__] and start_new_session
        assert stderr == subprocess.PIPE
        errors, theirs = os.pipe()
        self._ended, request = socket.socketpair()
        try:
            wanted = json.dumps({"environment": {**env}, "directory": os.getcwd()}).encode()
            socket.send_fds(server(), [b"\0"], [request.fileno(), stdin, stdout, theirs])
            self._ended.sendall(len(wanted).to_bytes(8, "big") + wanted)
        finally:
            request.close()
            os.close(theirs)
        self.stderr: IO[bytes] | None = os.fdopen(errors, "rb")
        self._ended.settimeout(START_TIMEOUT_S)
        self._answers = self._ended.makefile("r")
        self.pid = int(self._answers.readline())
        self._ended.settimeout(None)
        self._waiting = threading.Lock()
        self._exit_code: int | None = None

    def wait(self) -> int:
        """Wait until the fork has ended, and return its exit code, or the negative number of its signal."""
        with self._waiting:
            if self._exit_code is None:
                self._exit_code = os.waitstatus_to_exitcode(int(self._answers.readline()))
        return self._exit_code


@cache
def server() -> socket.socket:
    """Start the server of this process, and return the socket on which it takes requests."""
    ours, theirs = socket.socketpair()
    with theirs:
        # It ends with this process, whose end of the socket is closed then.
        subprocess.Popen(
            [sys.executable, "-m", __name__, str(theirs.fileno())],
            env={**os.environ, **child._OFFLINE, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return ours


def main(listening: int) -> None:
    """Be the server: fork for each request, until the other end of the socket is closed."""
    for module in IMPORTS:
        importlib.import_module(module)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=listening) as requests:
        while descriptors := socket.recv_fds(requests, 1, 4)[1]:
            if os.fork() == 0:
                requests.close()
                _be_keeper(*descriptors)
            for one in descriptors:
                os.close(one)


def _be_keeper(request: int, stdin: int, stdout: int, stderr: int) -> None:
    """Fork the child, and tell ``request`` its process id and, at its end, its status."""
    with socket.socket(fileno=request) as telling, telling.makefile("rb") as reading:
        wanted = json.loads(reading.read(int.from_bytes(reading.read(8), "big")))
        leads, is_leading = os.pipe()
        if (pid := os.fork()) == 0:
            os.setsid()
            os.close(is_leading)
            _be_child(wanted, stdin, stdout, stderr)
        for one in (is_leading, stdin, stdout, stderr):
            os.close(one)
        os.read(leads, 1)  # returns at once when the child leads a session, and can be killed with it
        telling.sendall(f"{pid}\n".encode())
        status = os.waitpid(pid, 0)[1]
        try:
            telling.sendall(f"{status}\n".encode())
        finally:
            os._exit(0)


def _be_child(wanted: Mapping[str, Any], *descriptors: int) -> None:
    """Go on as the process that ``ChildCall`` starts."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for standard, one in enumerate(descriptors):
        os.dup2(one, standard)
    sys.stdin, sys.stdout, sys.stderr = os.fdopen(0), os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
    os.environ.clear()
    os.environ.update(wanted["environment"])
    os.chdir(wanted["directory"])
    sys.path[:] = [wanted["directory"], *wanted["environment"]["PYTHONPATH"].split(os.pathsep)]
    sys.argv[:] = [child.__file__]
    importlib.invalidate_caches()
    child.main()


if __name__ == "__main__":
    main(int(sys.argv[1]))
