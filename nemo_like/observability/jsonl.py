"""``metrics.jsonl``: one JSON object per step, keys sorted."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from nemo_like.observability.disk import space_for, write_whole

# What differs between two runs with one seed; everything else must be equal.
_MEASURED_PREFIXES = ("timing/", "performance/")
_MEASURED_SUFFIX = "_s"  # seconds, and what is counted per second


class MetricsFile:
    """Appends one line per step. What is written about the same step becomes one object.

    A step's line reaches the file when the next step begins, or with ``flush``.
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
        """Write the step in progress; call it when nothing more of that step will come.

        Raises DiskFull or OSError; the file is then as it was, and the step's metrics are dropped.
        """
        if self._pending is not None:
            line = json.dumps(self._pending, sort_keys=True).encode() + b"\n"
            what, self._pending = f"the metrics of step {self._pending['step']}", None
            with space_for(what, self._path.parent, len(line)):
                self._append(line)

    def rewind(self, last_step: int) -> None:
        """Drop all records after ``last_step`` and a line that was cut short: they will be written again."""
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
        """Close without the step in progress."""
        self._pending = None
        self.close()

    def close(self) -> None:
        """Flush and close; safe to call twice."""
        if not self._file.closed:
            try:
                self.flush()
            finally:
                self._file.close()

    def _append(self, line: bytes) -> None:
        """All of it or nothing."""
        size = os.fstat(self._file.fileno()).st_size
        try:
            written = 0
            while written < len(line):
                written += self._file.write(line[written:])
        except OSError:
            self._file.truncate(size)
            raise


def _open(path: Path) -> FileIO:
    """Without a buffer, which would keep what the disk refused and fail again."""
    return path.open("ab", buffering=0)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All steps of a ``metrics.jsonl``, in order."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def without_measurements(record: Mapping[str, Any]) -> dict[str, Any]:
    """A step's metrics without those that depend on the machine's speed."""
    return {
        name: value
        for name, value in record.items()
        if not name.startswith(_MEASURED_PREFIXES) and not name.endswith(_MEASURED_SUFFIX)
    }


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None
