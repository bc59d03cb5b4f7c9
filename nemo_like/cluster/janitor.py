"""The janitor: a process that cleans up after the driver, however the driver ends.

    driver ──starts──▶ janitor   reads a pipe of which the driver holds the other end
    driver is killed ──────────▶ the pipe closes: the janitor ends the processes marked as the driver's, and
                                 removes their temporary files and names in shared memory

A driver that ends in order uses the janitor too: it closes the pipe and waits until everything is removed.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

# An environment variable that marks the processes which must not outlive the driver. Its value is the
# directory of the Ray to which they belong, below the driver's directory.
MARK = "NEMO_LIKE_ENDS_WITH"

_SHARED_MEMORY = Path("/dev/shm")
# After this long, a process that the kernel cannot end, such as one that waits for a device, is left behind.
_KILL_TIMEOUT_S = 10.0
_FINISH_TIMEOUT_S = 30.0
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@contextmanager
def swept_directory(parent: str) -> Iterator[Path]:
    """Put the temporary files of this process, and of processes it starts in this block, in a new directory.

    The directory lies in ``parent`` and is yielded. After the block, or when this process is killed inside
    it, the processes that are marked with the directory are killed and the directory is removed.
    """
    directory = Path(tempfile.mkdtemp(prefix="job-", dir=parent))
    janitor = _Janitor(directory)
    before, before_here = os.environ.get("TMPDIR"), tempfile.tempdir
    os.environ["TMPDIR"] = tempfile.tempdir = str(directory)
    try:
        yield directory
    finally:
        tempfile.tempdir = before_here
        if before is None:
            del os.environ["TMPDIR"]
        else:
            os.environ["TMPDIR"] = before
        janitor.finish()


class _Janitor:
    """The driver's side: starts the janitor's process and holds the pipe to it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(directory)],
            stdin=subprocess.PIPE,
            start_new_session=True,  # so that a terminal's signals reach the driver only
        )

    def finish(self) -> None:
        """Wait until the janitor has removed everything; do its work here where it was killed or stopped."""
        try:
            self._process.communicate(timeout=_FINISH_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.returncode:
            clean_up(self._directory)


def clean_up(directory: Path) -> None:
    """Kill every process marked with the directory or one below it, and remove the files that they leave.

    Only this machine's processes are looked at; stopped ones are killed too.
    """
    _end_marked(directory)
    for temporary in (*directory.glob("*"), *directory.glob("*/*")):
        # vLLM's workers on CPU meet in a file, and then in shared memory named like the file plus a suffix.
        for shared in _SHARED_MEMORY.glob(f"{temporary.name}-*"):
            shared.unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def _end_marked(directory: Path) -> None:
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    # Repeated, since a process may have started another just before its end.
    while (marked := list(_marked(directory))) and time.monotonic() < deadline:
        for process in marked:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        for process in marked:
            _wait(process, deadline - time.monotonic())


def _wait(process: psutil.Process, timeout_s: float) -> None:
    """Wait at most ``timeout_s`` until the process has ended, whether or not its parent has noticed."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return
    select.select([descriptor], [], [], max(0.0, timeout_s))
    os.close(descriptor)


def _marked(directory: Path) -> Iterator[psutil.Process]:
    for process in psutil.process_iter():
        try:
            mark = Path(process.environ().get(MARK, "/"))
            if directory in (mark, *mark.parents) and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except psutil.Error:  # gone, or another user's
            continue


def main(directory: str) -> None:
    """Run the janitor: wait until the driver has closed its end of standard input, then clean up."""
    for signum in _IGNORED_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    os.chdir("/")  # so that the user's directory is not kept busy
    sys.stdin.buffer.read()
    clean_up(Path(directory))


if __name__ == "__main__":
    main(*sys.argv[1:])
