"""A fork of a warm server that goes on as a process which a test would have started."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import threading
from typing import IO

START_TIMEOUT_S = 240.0  # for the imports of the server, on a busy machine


class ForkedProcess:
    """What tests use of a ``subprocess.Popen``, for a fork that leads a session of its own.

    The process is killed when this object is gone, also where the session of tests was killed.
    """

    stderr: IO[bytes] | None = None  # the other end of the pipe of its errors, where somebody reads it

    def __init__(self, connection: socket.socket, stdout: IO[str] | None = None) -> None:
        """``connection`` tells the process id and, when the process has ended, its exit code, on two lines.

        ``stdout`` is the other end of the pipe that the process writes to.
        """
        self._connection, self.stdout = connection, stdout
        self.returncode: int | None = None
        self._waiting = threading.Lock()
        self._output: list[str] = []
        self._reading: threading.Thread | None = None
        connection.settimeout(START_TIMEOUT_S)
        self.pid = int(self._line())
        connection.settimeout(None)

    def wait(self, timeout: float | None = None) -> int:
        """Return the exit code, or the negative number of the signal, once the process has ended.

        Raises TimeoutExpired after ``timeout`` seconds.
        """
        with self._waiting:
            if self.returncode is None:
                if not select.select([self._connection], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
                self.returncode = int(self._line())
                self._connection.close()
            return self.returncode

    def poll(self) -> int | None:
        """Return the same, or None where the process is still there."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Return what the process wrote until its end, and what was not read of it before.

        Raises TimeoutExpired after ``timeout`` seconds. It may be called again then.
        """
        stdout = self.stdout
        assert stdout is not None
        if self._reading is None:
            self._reading = threading.Thread(target=lambda: self._output.append(stdout.read()), daemon=True)
            self._reading.start()
        self._reading.join(timeout)
        if self._reading.is_alive():
            raise subprocess.TimeoutExpired(str(self.pid), timeout or 0)
        self.wait(timeout)
        return self._output[0], None

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, if it has not ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _line(self) -> str:
        """Return the next line, and read nothing beyond it."""
        line = b""
        while not line.endswith(b"\n"):
            line += self._connection.recv(1) or b"\n"
        return line.decode()
