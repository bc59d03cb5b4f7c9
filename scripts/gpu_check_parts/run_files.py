"""Reads what a run left: its metrics, its traces, and the ids of its processes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nemo_like.observability.jsonl import read_metrics
from nemo_like.observability.printable import warn_on_stderr

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Span:
    """A stage of a step, in nanoseconds of the system's clock."""

    name: str
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFiles:
    """The contents of a run directory that the check reads."""

    records: Sequence[Record]  # of metrics.jsonl
    stages: Sequence[Span]  # of the driver, in the traced steps
    processes: Mapping[int, str]  # names by process id

    @property
    def steps(self) -> list[Record]:
        """The records of training steps."""
        return [record for record in self.records if "timing/train/total_step_time" in record]


def read_run(run_dir: Path) -> RunFiles:
    """Read a run directory; what is missing in it is empty."""
    metrics = run_dir / "metrics.jsonl"
    traces = sorted(run_dir.glob("trace_step_*.json"), key=lambda path: int(path.stem.rpartition("_")[2]))
    return RunFiles(
        records=read_metrics(metrics, warn_on_stderr) if metrics.is_file() else [],
        stages=[span for path in traces for span in driver_spans(json.loads(path.read_text()))],
        processes={pid: name for name, pid in _content(run_dir / "processes.json").items()},
    )


def driver_spans(trace: Mapping[str, Any]) -> list[Span]:
    """Return the spans of the process "driver" in a trace."""
    events, origin_ns = trace["traceEvents"], trace["otherData"]["origin_ns"]
    drivers = {
        event["pid"]
        for event in events
        if event["name"] == "process_name" and event["args"]["name"] == "driver"
    }
    return [
        Span(
            event["name"],
            origin_ns + round(1000 * event["ts"]),
            origin_ns + round(1000 * (event["ts"] + event["dur"])),
        )
        for event in events
        if event["ph"] == "X" and event["pid"] in drivers
    ]


def _content(path: Path) -> dict[str, int]:
    return json.loads(path.read_text()) if path.is_file() else {}
