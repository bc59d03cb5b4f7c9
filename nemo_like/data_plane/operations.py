"""Records of what a process did with the data plane, and the metrics made of them. Standard library only.

Each process records its own operations. They travel to the driver in the answers of its calls, so nothing is
requested for their sake.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple


class Operation(NamedTuple):
    """One call that has ended; ``name`` is put, write, fetch, clear or open."""

    name: str
    column_bytes: Mapping[str, int]  # moved between this process and storage; 0: the process had it already
    seconds: float

    @property
    def num_bytes(self) -> int:
        return sum(self.column_bytes.values())


class OperationLog:
    """The operations of one process since they were last taken. Several threads may use it."""

    def __init__(self) -> None:
        self._finished: list[Operation] = []
        self._lock = threading.Lock()
        self._current = threading.local()  # bytes by column; a thread is in one operation at a time

    @contextmanager
    def operation(self, name: str, columns: Iterable[str] = ()) -> Iterator[None]:
        """Time the block and record it, unless it raises."""
        moved = self._current.bytes = dict.fromkeys(columns, 0)
        started_s = time.perf_counter()
        try:
            yield
            self.add(Operation(name, moved, time.perf_counter() - started_s))
        finally:
            del self._current.bytes

    def moved(self, column: str, num_bytes: int) -> None:
        """Count bytes that moved, in the operation that this thread is in; do nothing outside of one."""
        current: dict[str, int] | None = getattr(self._current, "bytes", None)
        if current is not None:
            current[column] = current.get(column, 0) + num_bytes

    def add(self, operation: Operation) -> None:
        with self._lock:
            self._finished.append(operation)

    def take(self) -> tuple[Operation, ...]:
        """Return the finished operations; the next call does not return them again."""
        with self._lock:
            taken, self._finished = tuple(self._finished), []
        return taken


def operation_metrics(operations: Iterable[Operation], prefix: str = "data_plane/") -> dict[str, float]:
    """Return the metrics ``{operation}/{statistic}`` and ``{operation}/{column}/{statistic}``
    (docs/reference/metrics_speed.md).

    A column's latency and throughput are measured over whole calls: all calls that carried the column.
    """
    groups: dict[str, list[Operation]] = {}
    column_bytes: dict[str, int] = {}
    for operation in operations:
        groups.setdefault(operation.name, []).append(operation)
        for column, num_bytes in operation.column_bytes.items():
            group = f"{operation.name}/{column}"
            groups.setdefault(group, []).append(operation)
            column_bytes[group] = column_bytes.get(group, 0) + num_bytes
    metrics: dict[str, float] = {}
    for group, members in groups.items():
        moved = sum(member.num_bytes for member in members)
        seconds = sorted(member.seconds for member in members)
        metrics[f"{prefix}{group}/count"] = float(len(members))
        if any(member.column_bytes for member in members):
            metrics[f"{prefix}{group}/bytes"] = float(column_bytes.get(group, moved))
            metrics[f"{prefix}{group}/gb_per_s"] = moved / 1e9 / max(sum(seconds), 1e-9)
        metrics[f"{prefix}{group}/latency_p50_s"] = _percentile(seconds, 50)
        metrics[f"{prefix}{group}/latency_p95_s"] = _percentile(seconds, 95)
        metrics[f"{prefix}{group}/latency_max_s"] = seconds[-1]
    return metrics


def _percentile(ascending: Sequence[float], per_cent: int) -> float:
    """Return the nearest-rank percentile: the smallest value that ``per_cent`` per cent do not exceed."""
    rank = -(-per_cent * len(ascending) // 100)
    return ascending[max(rank, 1) - 1]
