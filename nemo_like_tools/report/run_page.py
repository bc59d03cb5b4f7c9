"""Writes the report's page: a template, a style and plain JavaScript from ``assets``, with the runs' data
compressed.

    RunData.update ──▶ head (curves, rows of all samples) + a shard per dumped file ──▶ one HTML file

The browser unpacks the head when the page opens, and a shard when one of its samples is opened.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.resources import files
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

from nemo_like.observability.disk import write_whole
from nemo_like.observability.metric_meanings import metrics_page, with_meanings
from nemo_like.observability.progress import STEP_STAGES
from nemo_like.observability.run_directory import RunDirectory
from nemo_like_tools.report.sample_files import (
    ReportProblem,
    SampleFile,
    Shard,
    packed,
    read_curves,
    read_shard,
    sample_files,
)

# The most that a page holds of each run and mode; beyond it only every second, fourth, ... file is kept.
MAX_SAMPLES = 20_000
_MAX_BYTES = 64 << 20
_SCRIPTS = ("report_data.js", "report_widgets.js", "report_samples.js", "report_views.js")


class RunData:
    """The data of one run in a page. ``update`` reads a file again only when it has changed."""

    def __init__(self, directory: Path, max_samples: int = MAX_SAMPLES) -> None:
        self._directory, self._max_samples = RunDirectory(directory), max_samples
        self._shards: dict[SampleFile, tuple[tuple[int, int], Shard]] = {}
        self._num_lines: dict[SampleFile, tuple[tuple[int, int], int]] = {}
        self._left_out: list[SampleFile] = []

    @property
    def shards(self) -> list[Shard]:
        return [shard for _, shard in self._shards.values()]

    def update(self) -> None:
        """Read new and changed files of dumped samples.

        Raises ReportProblem when the directory is no run directory, or when a line is no sample.
        """
        everything = sample_files(self._directory.path)
        if not self._directory.metrics_path.is_file() and not everything:
            raise ReportProblem(
                f"{self._directory.path} is no run directory: it has neither metrics.jsonl nor rollouts; "
                "give the path that a run prints as run_dir"
            )
        chosen: list[SampleFile] = []
        for mode in ("training", "validation"):
            of_mode = [file for file in everything if file.mode == mode]
            chosen += chosen_files(
                of_mode,
                samples=[self._count(file) for file in of_mode],
                sizes=[file.path.stat().st_size for file in of_mode],
                max_samples=self._max_samples,
            )
        self._left_out = [file for file in everything if file not in set(chosen)]
        self._shards = {file: (_state(file), self._shard(file)) for file in sorted(chosen)}

    def head(self) -> dict[str, Any]:
        """Return everything except the texts and tokens of the samples, ready for JSON."""
        problems: dict[tuple[Any, ...], int] = {}
        failures: dict[tuple[str, str], int] = {}
        rows = [
            [
                *(shard, index, row.group, row.generation),
                problems.setdefault(row.problem, len(problems)),
                *(_rounded(row.reward), row.length, row.outcome),
                None if row.failure is None else failures.setdefault(row.failure, len(failures)),
            ]
            for shard, one in enumerate(self.shards)
            for index, row in enumerate(one.rows)
        ]
        names = ("shard", "place", "group", "generation", "problem", "reward", "length", "outcome", "failure")
        columns = zip(*rows, strict=True) if rows else [()] * len(names)
        return {
            "name": self._directory.name,
            "curves": read_curves(self._directory.metrics_path),
            "shards": [
                {"mode": one.mode, "step": one.step, "dumped": self._count(file), "shown": len(one.rows)}
                for file, (_, one) in self._shards.items()
            ],
            "left_out": [[file.mode, file.step] for file in self._left_out],
            "problems": list(problems),
            "failures": list(failures),
            "rows": {name: list(values) for name, values in zip(names, columns, strict=True)},
        }

    def _shard(self, file: SampleFile) -> Shard:
        state = _state(file)
        if file in self._shards and self._shards[file][0] == state:
            return self._shards[file][1]
        return read_shard(file, max_samples=self._max_samples, max_size=_MAX_BYTES)

    def _count(self, file: SampleFile) -> int:
        state = _state(file)
        if file not in self._num_lines or self._num_lines[file][0] != state:
            with file.path.open("rb") as lines:
                self._num_lines[file] = state, sum(1 for _ in lines)
        return self._num_lines[file][1]


def chosen_files(
    of_mode: Sequence[SampleFile], *, samples: Sequence[int], sizes: Sequence[int], max_samples: int
) -> list[SampleFile]:
    """Return the files that a page shows: the first, the latest, and evenly spread ones between, if they fit.

    ``samples`` and ``sizes`` (bytes) are by file. Only the latest file is left when two are too large.
    """
    if not of_mode:
        return []
    for stride in (1 << power for power in count()):
        indexes = sorted({*range(0, len(of_mode), stride), len(of_mode) - 1})
        if stride >= 2 * len(of_mode):
            indexes = indexes[-1:]
        fits = (
            sum(samples[i] for i in indexes) <= max_samples and sum(sizes[i] for i in indexes) <= _MAX_BYTES
        )
        if fits or len(indexes) == 1:
            return [of_mode[i] for i in indexes]
    raise AssertionError("strides end with the number of files")


def write_report(path: Path, runs: Sequence[RunData]) -> None:
    """Write the page of runs that are up to date. Raises ReportProblem, DiskFull or OSError."""
    assets = files(__package__) / "assets"
    heads = [run.head() for run in runs]
    names = {name for head in heads for name in head["curves"]["values"]}
    head = {
        "stages": STEP_STAGES,
        "runs": heads,
        "meanings": with_meanings(names),
        "metrics_page": quote(os.path.relpath(metrics_page(), path.absolute().parent)),
    }
    data = [_data("head", packed(head))]
    data += [
        _data(f"shard-{number}-{index}", shard.packed)
        for number, run in enumerate(runs)
        for index, shard in enumerate(run.shards)
    ]
    parts = {
        "/*STYLE*/": (assets / "report.css").read_text(encoding="utf-8"),
        "<!--DATA-->": "\n".join(data),
        "/*SCRIPT*/": "\n".join((assets / name).read_text(encoding="utf-8") for name in _SCRIPTS),
    }
    page = (assets / "report.html").read_text(encoding="utf-8")
    for marker, part in parts.items():
        before, _, after = page.partition(marker)
        page = f"{before}{part}{after}"
    write_whole(path, page.encode(), "the report")


def _data(name: str, contents: str) -> str:
    return f'<script type="text/plain" id="{name}">{contents}</script>'


def _state(file: SampleFile) -> tuple[int, int]:
    """Return a file's time of modification and its size, which tell whether it has changed."""
    status = file.path.stat()
    return status.st_mtime_ns, status.st_size


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)
