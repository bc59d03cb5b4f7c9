"""Named spans of time, recorded between ``start_trace`` and ``take_trace``. Standard library only.

    with span("fetch"):
        ...

While nothing is recorded, a span only reads two variables. Times come from the system's clock, so the spans
of all processes of a machine lie on one time line.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

Annotation = Callable[[str], AbstractContextManager[object]]


@dataclass(frozen=True, slots=True)
class Span:
    """A block that a thread ran from ``start_ns`` to ``end_ns``, in nanoseconds of the system's clock."""

    name: str
    thread: str
    start_ns: int
    end_ns: int


_recorded: list[Span] | None = None
_annotations: dict[str, Annotation] = {}
_NOTHING = nullcontext()


def span(name: str) -> AbstractContextManager[object]:
    """Mark the ``with`` block as a span of the trace, if one is recorded, and of every added annotation."""
    if _recorded is None and not _annotations:
        return _NOTHING
    return _marked(name)


def start_trace() -> None:
    """Record the spans of this process from now on; an earlier recording is forgotten."""
    global _recorded
    _recorded = []


def take_trace() -> list[Span]:
    """Stop recording, and return the spans of this process in the order in which they ended."""
    global _recorded
    spans, _recorded = _recorded, None
    return spans or []


def add_annotation(key: str, annotation: Annotation) -> None:
    """Enter ``annotation(name)`` around every span of this process, as for a profiler that shows names."""
    _annotations[key] = annotation


def remove_annotation(key: str) -> None:
    """Remove an annotation; safe when it was never added."""
    _annotations.pop(key, None)


@contextmanager
def _marked(name: str) -> Iterator[None]:
    start_ns = time.time_ns()
    try:
        with ExitStack() as stack:
            for annotation in _annotations.values():
                stack.enter_context(annotation(name))
            yield
    finally:
        if (recorded := _recorded) is not None:
            recorded.append(Span(name, threading.current_thread().name, start_ns, time.time_ns()))


def chrome_trace(processes: Mapping[str, list[Span]]) -> dict[str, object]:
    """Return the spans of each process in Chrome's trace event format, for chrome://tracing and
    ui.perfetto.dev.

    Processes keep their order. Microseconds count from the beginning of the first span;
    ``otherData.origin_ns`` has that moment on the system's clock. Spans of one thread that overlap without
    nesting, as coroutines' spans do, go to different tracks.
    """
    origin_ns = min((item.start_ns for spans in processes.values() for item in spans), default=0)
    events: list[dict[str, object]] = []
    for pid, (process, spans) in enumerate(processes.items()):
        events.append(_label("process_name", pid, 0, {"name": process}))
        events.append(_label("process_sort_index", pid, 0, {"sort_index": pid}))
        for tid, (track, of_track) in enumerate(tracks(spans).items()):
            events.append(_label("thread_name", pid, tid, {"name": track}))
            events += [
                {
                    "name": item.name,
                    "ph": "X",
                    "pid": pid,
                    "tid": tid,
                    "ts": (item.start_ns - origin_ns) / 1000,
                    "dur": (item.end_ns - item.start_ns) / 1000,
                }
                for item in of_track
            ]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"origin_ns": origin_ns}}


def tracks(spans: list[Span]) -> dict[str, list[Span]]:
    """Return the spans by track. Any two spans of a track either do not overlap or are nested.

    A thread's first track has the thread's name; its further tracks have a number behind it.
    """
    by_track: dict[str, list[Span]] = {}
    open_ends_ns: dict[str, list[int]] = {}
    for item in sorted(spans, key=lambda item: (item.start_ns, -item.end_ns)):
        number = 1
        while True:
            track = item.thread if number == 1 else f"{item.thread} {number}"
            ends_ns = open_ends_ns.setdefault(track, [])
            while ends_ns and ends_ns[-1] <= item.start_ns:
                ends_ns.pop()
            if not ends_ns or item.end_ns <= ends_ns[-1]:
                break
            number += 1
        ends_ns.append(item.end_ns)
        by_track.setdefault(track, []).append(item)
    return by_track


def _label(kind: str, pid: int, tid: int, args: Mapping[str, object]) -> dict[str, object]:
    return {"name": kind, "ph": "M", "pid": pid, "tid": tid, "args": dict(args)}
