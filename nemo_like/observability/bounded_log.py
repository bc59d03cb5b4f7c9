"""Keeps a growing log short: its beginning and its end stay, its middle is cut out.

    beginning ── --- N bytes were left out here --- ── end ◀── appended

A process and its children append with O_APPEND, and do not notice a cut. Bytes written at the moment of a cut
may be lost too.
"""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# A log longer than the former is cut to its beginning and its end, each of the latter length.
MAX_BYTES = 64 << 20
KEPT_BYTES = 16 << 20
# How often a process checks its log. A log that grows by 400 MB a second exceeds the limit by as much.
_PERIOD_S = 0.5
_MARK = re.compile(rb"\n--- ([0-9,]+) bytes were left out here ---\n")
_MARK_BYTES = 80


class BoundedLog:
    """A log that ``cut`` keeps short."""

    def __init__(self, path: Path, *, max_bytes: int, kept_bytes: int) -> None:
        """Once the log at ``path`` has more than ``max_bytes``, keep its first and its last ``kept_bytes``
        bytes and cut out what is between."""
        self._path, self._max_bytes, self._kept_bytes = path, max_bytes, kept_bytes

    def cut(self) -> None:
        """Cut the middle out if the log is too long. A file that cannot be cut stays as it is."""
        try:
            if self._path.stat().st_size > self._max_bytes:
                self._cut()
        except OSError:
            return

    def _cut(self) -> None:
        with self._path.open("r+b") as file:
            head, num_left_out = self._head(file.read(self._kept_bytes + _MARK_BYTES))
            size = os.fstat(file.fileno()).st_size
            file.seek(max(head, size - self._kept_bytes - 1))
            end = file.read()
            while more := file.read():  # bytes that were written meanwhile
                end += more
            tail = end[end.find(b"\n") + 1 :]  # whole lines, or a part of a longer line
            num_left_out += os.fstat(file.fileno()).st_size - head - len(tail)
            file.truncate(head)
        with self._path.open("ab") as file:
            file.write(b"\n--- %s bytes were left out here ---\n" % f"{num_left_out:,}".encode() + tail)

    def _head(self, beginning: bytes) -> tuple[int, int]:
        """Return how many bytes stay at the beginning, and how many bytes earlier cuts left out after it."""
        if mark := _MARK.search(beginning):
            return mark.start(), int(mark[1].replace(b",", b"")) - len(mark[0])
        last_line = beginning.rfind(b"\n", 0, self._kept_bytes)
        return (last_line if last_line >= 0 else self._kept_bytes), 0


@contextmanager
def kept_short(path: Path) -> Iterator[None]:
    """Keep a log short during the ``with`` block."""
    is_over = threading.Event()
    keeper = threading.Thread(target=_keep_short, args=(path, is_over), name="log", daemon=True)
    keeper.start()
    try:
        yield
    finally:
        is_over.set()
        keeper.join()


def keep_short(path: Path) -> None:
    """Keep a log short for as long as this process runs."""
    threading.Thread(target=_keep_short, args=(path, threading.Event()), name="log", daemon=True).start()


def _keep_short(path: Path, is_over: threading.Event) -> None:
    log = BoundedLog(path, max_bytes=MAX_BYTES, kept_bytes=KEPT_BYTES)
    while not is_over.wait(_PERIOD_S):
        log.cut()
    log.cut()
