"""Child processes of slow checks for unit tests: forks of a warm server, which has imported what checks load.

Nearly all of a check's time is the import of torch and transformers. ``tests/unit/preflight/test_child.py``
starts real children, and so do the functional tests.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Any
from unittest import mock

from nemo_like.preflight.child import ChildCall
from tests.functional.warm_servers import CHECK, has_check

START_TIMEOUT_S = 240.0  # for the imports, on a busy machine
_Popen = subprocess.Popen


class ForkedCall(ChildCall):
    """To be used in the place of ``ChildCall``."""

    def __init__(self, function: Callable[..., Any], *arguments: Any, timeout_s: float) -> None:
        with mock.patch.object(subprocess, "Popen", _forked_or_started):
            super().__init__(function, *arguments, timeout_s=timeout_s)


def _forked_or_started(
    command: Sequence[str], *, env: Mapping[str, str], stdin: int, stdout: int, **others: Any
) -> Fork | subprocess.Popen[bytes]:
    """Return the fork that answers the call; a process as ever where warm servers are too many already."""
    assert list(command) == [sys.executable, "-m", CHECK]
    assert others == {"stderr": subprocess.PIPE, "start_new_session": True}
    connection, (errors, theirs) = socket.socket(socket.AF_UNIX), os.pipe()
    with mock.patch.object(subprocess, "Popen", _Popen):  # which starts the server
        is_forked = has_check(connection, env, [stdin, stdout, theirs], at_once=True)
    os.close(theirs)
    if is_forked:
        return Fork(connection, os.fdopen(errors, "rb"))
    connection.close()
    os.close(errors)
    return _Popen(command, env=env, stdin=stdin, stdout=stdout, **others)


class Fork:
    """What a ``Child`` needs of a ``subprocess.Popen``, for a fork of a warm server."""

    def __init__(self, connection: socket.socket, stderr: IO[bytes]) -> None:
        self.stderr: IO[bytes] | None = stderr
        self._connection, self._told = connection, connection.makefile("r")
        connection.settimeout(START_TIMEOUT_S)
        self.pid = int(self._told.readline())
        connection.settimeout(None)
        self._waiting = threading.Lock()
        self._exit_code: int | None = None

    def wait(self) -> int:
        """Wait until the fork has ended, and return its exit code, or the negative number of its signal."""
        with self._waiting:
            if self._exit_code is None:
                self._exit_code = int(self._told.readline())
                self._told.close()
                self._connection.close()
        return self._exit_code
