"""Holds the directories that a run writes while it lasts, and ends the run when it loses one."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from nemo_like.observability.run_lock import LEASE_S, DirectoryLock

_RENEW_S = LEASE_S / 6


class HeldDirectories:
    """The directories that this run holds, so that no other run writes them.

    ``lost`` says why a directory no longer belongs to this run; None while it holds all.
    """

    def __init__(self, directories: Sequence[Path], renew_s: float = _RENEW_S) -> None:
        """Take all directories; inside ``renewing`` each gets a sign of life every ``renew_s`` seconds.

        Raises DirectoryInUse when another run holds one, OSError when one cannot be written.
        """
        self.lost: str | None = None
        self._renew_s = renew_s
        self._end = threading.Event()
        self._locks: list[DirectoryLock] = []
        try:
            for directory in dict.fromkeys(directories):
                self._locks.append(DirectoryLock(directory))
        except BaseException:
            self.release()
            raise

    @contextmanager
    def renewing(self, warn: Callable[[str], None]) -> Iterator[None]:
        """Give the directories signs of life from a thread while the block runs.

        When a directory is lost, ``lost`` says why, and KeyboardInterrupt ends the block. ``warn`` gets a
        sentence when a sign of life cannot be given. Only the main thread may call this.
        """
        # The thread interrupts the block by SIGALRM: a shell's background job ignores SIGINT.
        previous = signal.signal(signal.SIGALRM, _interrupt)
        thread = threading.Thread(target=self._renew, args=(warn,), name="run lock", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._end.set()
            thread.join(timeout=self._renew_s)
            signal.signal(signal.SIGALRM, previous)

    def release(self) -> None:
        """Let other runs have the directories."""
        while self._locks:
            self._locks.pop().release()

    def _renew(self, warn: Callable[[str], None]) -> None:
        has_warned = False
        while not self._end.wait(self._renew_s):
            try:
                lost = next((reason for lock in self._locks if (reason := lock.renew())), None)
            except OSError as error:
                if not has_warned:
                    warn(
                        f"this run could not give a sign of life in its directory ({error}); it tries again, "
                        f"and after {LEASE_S:.0f} s without one another machine may start it anew"
                    )
                has_warned = True
                continue
            has_warned = False
            if lost and not self._end.is_set():
                self.lost = lost
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)
                return


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
