"""Writes and reads ``metrics.jsonl``, which has one JSON object per step, with sorted keys."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from nemo_like.observability.disk import space_for, write_whole

# Metrics that differ between two runs with one seed; all others must be equal.
_MEASURED_PREFIXES = ("timing/", "performance/")
_MEASURED_SUFFIX = "_s"  # seconds, and rates per second


class MetricsFile:
    """Writes a ``metrics.jsonl``, one line per step. All metrics of a step become one object.

    A step's line reaches the file when the next step is written, or with ``flush``.
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
        """Append the line of the latest step; call it when nothing more of that step will come.

        Raises DiskFull or OSError; the file is then as it was, and the step's metrics are lost.
        """
        if self._pending is not None:
            line = json.dumps(self._pending, sort_keys=True).encode() + b"\n"
            what, self._pending = f"the metrics of step {self._pending['step']}", None
            with space_for(what, self._path.parent, len(line)):
                self._append(line)

    def rewind(self, last_step: int) -> None:
        """Remove the lines after ``last_step``, which will be written again, and one that was cut short."""
        self._pending = None
        self._file.close()
        kept = []
        for line in self._path.read_text(encoding="utf-8").splitlines(keepends=True):
            if not line.endswith("\n") or json.loads(line)["step"] > last_step:
                break
            kept.append(line)
        write_whole(self._path, "".join(kept).encode(), "the metrics of earlier steps")
        self._file = _open(self._path)

    def abandon(self) -> None:
        """Close the file without the latest step, if it was not flushed."""
        self._pending = None
        self.close()

    def close(self) -> None:
        """Flush and close the file; safe to call twice."""
        if not self._file.closed:
            try:
                self.flush()
            finally:
                self._file.close()

    def _append(self, line: bytes) -> None:
        """Append the whole line, or restore the file and raise OSError."""
        size = os.fstat(self._file.fileno()).st_size
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError:
            self._file.truncate(size)
            raise


def _open(path: Path) -> FileIO:
    """Open a file to append, unbuffered: a buffer would keep what the disk refused, and fail again."""
    return path.open("ab", buffering=0)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the objects of a ``metrics.jsonl``, one per step, in order."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def without_measurements(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a step's metrics without those that depend on the machine's speed."""
    return {
        name: value
        for name, value in record.items()
        if not name.startswith(_MEASURED_PREFIXES) and not name.endswith(_MEASURED_SUFFIX)
    }


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None
