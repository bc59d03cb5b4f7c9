"""A process that removes what another leaves, however that ends.

    driver ──starts──▶ janitor   reads a pipe of which the driver holds the other end
    driver ends, is killed ────▶ the pipe closes: it ends the processes that are marked as the driver's,
                                 and removes its temporary files and names in shared memory

The driver itself ends in the same way: it closes the pipe and waits.
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

# In the environment of processes that shall not outlive the driver: a directory below the driver's.
MARK = "NEMO_LIKE_ENDS_WITH"

_SHARED_MEMORY = Path("/dev/shm")
# A process that the kernel does not let go of, for instance one that waits for a device, is left behind.
_KILL_TIMEOUT_S = 10.0
_FINISH_TIMEOUT_S = 30.0
_IGNORED_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


@contextmanager
def swept_directory(parent: str) -> Iterator[Path]:
    """Have the temporary files of this process, and of those that it starts in this block, in a new directory
    in ``parent``. It is gone after the block, and when this process is killed in it."""
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
    """The driver's side."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._process = subprocess.Popen(
            [sys.executable, "-P", __file__, str(directory)],
            stdin=subprocess.PIPE,
            start_new_session=True,  # a terminal's signals are for the driver
        )

    def finish(self) -> None:
        """Return when everything is removed, by this process where the janitor was killed or stopped."""
        try:
            self._process.communicate(timeout=_FINISH_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.returncode:
            clean_up(self._directory)


def clean_up(directory: Path) -> None:
    """End every process of this machine that is marked with the directory or one below, stopped ones too, and
    remove what they leave."""
    _end_marked(directory)
    for temporary in (*directory.glob("*"), *directory.glob("*/*")):
        # vLLM's workers on CPU meet in a file, and then in shared memory that has the file's name and more.
        for shared in _SHARED_MEMORY.glob(f"{temporary.name}-*"):
            shared.unlink(missing_ok=True)
    shutil.rmtree(directory, ignore_errors=True)


def _end_marked(directory: Path) -> None:
    deadline = time.monotonic() + _KILL_TIMEOUT_S
    # Again, since one may have started another just before its end.
    while (marked := list(_marked(directory))) and time.monotonic() < deadline:
        for process in marked:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        for process in marked:
            _wait(process, deadline - time.monotonic())


def _wait(process: psutil.Process, timeout_s: float) -> None:
    """Return when it has ended, whether or not its parent has noticed."""
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
    """Wait until the driver has closed its end of standard input."""
    for signum in _IGNORED_SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    os.chdir("/")  # no directory of a user is kept busy
    sys.stdin.buffer.read()
    clean_up(Path(directory))


if __name__ == "__main__":
    main(*sys.argv[1:])
