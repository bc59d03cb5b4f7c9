"""One process of the benchmark: it holds a client of every plane, and does what it is told."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from scripts.bench.data_plane_bench.batch import Batch, Shape
from scripts.bench.data_plane_bench.planes import Plane, Rows, make_plane


@dataclass(frozen=True, slots=True)
class Stage:
    """Fetch columns, then write columns, as one stage of a step does."""

    reads: tuple[str, ...]
    writes: tuple[str, ...] = ()
    # As policy workers do: keep what was fetched and written for the next stage, which also waits for what is
    # still being written. Else each stage waits itself, forgets, and the next one fetches again.
    keeps: bool = False


@dataclass(frozen=True, slots=True)
class StageResult:
    fetch_s: float
    write_s: float
    written: Any  # for ``Plane.merge``


class Station:
    """The target of an actor; the driver has one in its own process."""

    def __init__(self) -> None:
        self._planes: dict[str, Plane] = {}
        self._batch: Batch | None = None
        self._laid_out: dict[tuple[str, str, tuple[int, ...]], Any] = {}
        self._buffers: dict[int, tuple[np.ndarray, np.ndarray]] = {}
        self._writer = ThreadPoolExecutor(1)
        self._writing: Future[Any] | None = None

    def pid(self) -> int:
        return os.getpid()

    def connect(self, plane: str, source: Any) -> None:
        self._planes[plane] = make_plane(plane, source)

    def load(self, shape: Shape) -> None:
        """Make the batch of this shape, and lay it out for every plane."""
        self._batch = Batch.make(shape)
        self._laid_out.clear()
        self._buffers.clear()
        for plane in self._planes.values():
            plane.prepare(self._batch)

    def put(self, plane: str, partition: str) -> tuple[Rows, float]:
        """What was put, and its seconds."""
        return _timed(lambda: self._planes[plane].put(partition))

    def stage(self, plane: str, rows: Rows, stage: Stage) -> StageResult:
        client = self._planes[plane]
        fetch_s = write_s = 0.0
        written = None
        if self._writing is not None:
            self._writing.result()
            self._writing = None
        if stage.reads:
            _, fetch_s = _timed(lambda: client.fetch(rows, stage.reads))
        if stage.writes:
            columns = {name: self._written(plane, name, rows) for name in stage.writes}
            if stage.keeps:
                self._writing = self._writer.submit(client.write, rows, columns)
                written = tuple(columns)
            else:
                written, write_s = _timed(lambda: client.write(rows, columns))
        if not stage.keeps:
            client.forget(rows)
        return StageResult(fetch_s, write_s, written)

    def check(self, plane: str, rows: Rows, stage: Stage) -> StageResult:
        """``stage``, and a comparison of every fetched value with what was written."""
        assert self._batch is not None
        fetched = self._planes[plane].fetch(rows, stage.reads)
        self._batch.check(rows.rows, {name: np.asarray(values) for name, values in fetched.items()})
        del fetched
        return self.stage(plane, rows, stage)

    @property
    def shape(self) -> Shape:
        """Of the loaded batch."""
        assert self._batch is not None
        return self._batch.shape

    def client(self, plane: str) -> Plane:
        return self._planes[plane]

    def memcpy(self, sizes: Sequence[int]) -> float:
        """Seconds to copy so many bytes between warm buffers, one copy per size."""
        for size in sizes:
            if size not in self._buffers:
                self._buffers[size] = np.ones(size, np.uint8), np.ones(size, np.uint8)
        started = time.perf_counter()
        for size in sizes:
            source, target = self._buffers[size]
            np.copyto(target, source)
        return time.perf_counter() - started

    def _written(self, plane: str, name: str, rows: Rows) -> Any:
        key = plane, name, rows.rows
        if key not in self._laid_out:
            assert self._batch is not None
            self._laid_out[key] = self._planes[plane].lay_out(rows, self._batch.column(name, rows.rows))
        return self._laid_out[key]


def _timed(action: Callable[[], Any]) -> tuple[Any, float]:
    started = time.perf_counter()
    result = action()
    return result, time.perf_counter() - started
