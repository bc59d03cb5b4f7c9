"""Writes and reads ``metrics.jsonl``, which has one JSON object per step, with sorted keys.

``FollowedLines`` reads this and other files of JSON lines while another process writes them.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from nemo_like.observability.disk import append_whole, space_for, write_whole

# Metrics that differ between two runs with one seed; all others must be equal.
_MEASURED_PREFIXES = ("timing/", "performance/")
_MEASURED_SUFFIX = "_s"  # seconds, and rates per second


class MetricsFile:
    """Writes a ``metrics.jsonl``, one line per step.

    All metrics of a step become one object. A step's line reaches the file when the next step is written, or
    with ``flush``.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = _open(path)
        self._pending: dict[str, float | None] | None = None

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add metrics of a step. Not-a-number and infinity are written as null."""
        if self._pending is None or self._pending["step"] != step:
            self.flush()
            self._pending = {"step": step}
        self._pending.update({name: _json_number(value) for name, value in metrics.items()})

    def flush(self) -> None:
        """Append the line of the latest step; call it once all metrics of the step are known.

        Raises DiskFull or OSError; the file is then as it was, and the step's metrics are lost.
        """
        if self._pending is not None:
            line = json.dumps(self._pending, sort_keys=True).encode() + b"\n"
            what, self._pending = f"the metrics of step {self._pending['step']}", None
            with space_for(what, self._path.parent, len(line)):
                append_whole(self._file, line)

    def rewind(self, last_step: int, warn: Callable[[str], None] = warnings.warn) -> None:
        """Remove the lines after ``last_step``, which the run will write again, and lines that hold no
        metrics.

        A last line that was cut short is removed too. ``warn`` gets a sentence about other lines without
        metrics.
        """
        self._pending = None
        self._file.close()
        kept = []
        for line, record in _metrics_lines(self._path, warn):
            if record["step"] > last_step:
                break
            kept.append(line)
        write_whole(self._path, b"".join(kept), "the metrics of earlier steps")
        self._file = _open(self._path)

    def abandon(self) -> None:
        """Close the file, and drop the latest step if it was not flushed."""
        self._pending = None
        self.close()

    def close(self) -> None:
        """Flush and close the file; safe to call twice."""
        if not self._file.closed:
            try:
                self.flush()
            finally:
                self._file.close()


def _open(path: Path) -> FileIO:
    """Open a file to append without a buffer, which would keep what the disk refused and fail again later."""
    return path.open("ab", buffering=0)


def read_metrics(path: Path, warn: Callable[[str], None] = warnings.warn) -> list[dict[str, Any]]:
    """Return the objects of a ``metrics.jsonl``, one per step, in order.

    Skips a last line that was cut short, and lines that hold no metrics; ``warn`` gets a sentence about the
    latter. Raises OSError when the file cannot be read.
    """
    return [record for _, record in _metrics_lines(path, warn)]


def is_metrics(value: Mapping[str, Any]) -> bool:
    """Return whether an object has the metrics of a step: an integer ``step``, else only numbers and null."""
    is_of_step = type(value.get("step")) is int
    return is_of_step and all(one is None or isinstance(one, int | float) for one in value.values())


def json_object(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a line; None when the line holds anything else."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def skipped_lines(path: Path, numbers: Sequence[int], what: str) -> str:
    """Return a sentence that says which lines of a file, counted from 1, are no lines of ``what``."""
    first, *others = numbers
    more = f", and {len(others)} more are none" if others else ""
    return f"{path}:{first} is no line of {what}{more}; left out"


def _metrics_lines(path: Path, warn: Callable[[str], None]) -> list[tuple[bytes, dict[str, Any]]]:
    """Return the lines of a ``metrics.jsonl`` with their objects, in the way of ``read_metrics``."""
    found: list[tuple[bytes, dict[str, Any]]] = []
    bad: list[int] = []
    *lines, last = path.read_bytes().split(b"\n")
    for number, line in enumerate([*lines, last], start=1):
        record = json_object(line)
        if record is not None and is_metrics(record):
            found.append((line + b"\n", record))
        elif number <= len(lines):
            bad.append(number)
    if bad:
        warn(skipped_lines(path, bad, "metrics"))
    return found


@dataclass(frozen=True, slots=True)
class NewLines:
    """The new objects of a followed file, and whether another file has taken its place."""

    values: list[dict[str, Any]]
    is_replaced: bool  # another file has replaced the one that was read; ``values`` has all of its lines


class FollowedLines:
    """A file of JSON lines that another process writes, on any file system that both processes see.

    The file may be missing at first. An unfinished last line is read once it has its end.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode: int | None = None
        self._offset = 0

    def new(self) -> NewLines:
        """Return the objects written since the last call; lines that are no JSON objects are skipped.

        A process that is killed while it writes leaves such a line. Raises OSError when the file cannot be
        read.
        """
        try:
            # Opened anew each time, which makes NFS ask the server.
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
                is_same = status.st_ino == self._inode and status.st_size >= self._offset
                is_replaced = self._inode is not None and not is_same
                self._inode, start = status.st_ino, self._offset if is_same else 0
                file.seek(start)
                whole, _, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return NewLines([], is_replaced=False)
        self._offset = start + len(whole) + 1 if whole else start
        return NewLines([value for line in whole.splitlines() if (value := json_object(line))], is_replaced)


def without_measurements(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a step that do not depend on the machine's speed."""
    return {
        name: value
        for name, value in record.items()
        if not name.startswith(_MEASURED_PREFIXES) and not name.endswith(_MEASURED_SUFFIX)
    }


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None
