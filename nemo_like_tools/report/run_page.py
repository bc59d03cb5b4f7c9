"""Writes the report's page: a template, a style and plain JavaScript from ``assets``, with the runs' data
compressed.

    RunData.update ──▶ head (state, configuration, curves, rows of all samples)
                       + a shard per dumped file + the scripts that draw curves ──▶ one HTML file

The browser unpacks the head when the page opens, the scripts when the first curve is in sight, and a shard
when one of its samples is opened or its responses are searched.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from importlib.resources import files
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import quote

from nemo_like.observability.disk import write_whole
from nemo_like.observability.metric_meanings import metrics_page, with_meanings
from nemo_like.observability.progress import STEP_STAGES
from nemo_like.observability.run_directory import RunDirectory
from nemo_like_tools.report.chart_library import chart_library
from nemo_like_tools.report.run_state import evaluated_groups, run_configuration, run_state
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
MAX_BYTES = 64 << 20
_SCRIPTS = (
    *("data", "filters", "search"),
    *("elements", "links", "table", "smoothing", "charts", "curves"),
    *("runs", "overview", "tables", "tokens", "sample", "times", "metrics", "configuration", "views"),
)


_ROW = (
    *("shard", "place", "group", "generation", "problem", "reward", "length", "outcome", "failure"),
    *("response", "components", "parts"),
)


class RunData:
    """The data of one run in a page. ``update`` reads a file again only when it has changed."""

    def __init__(
        self,
        directory: Path,
        max_samples: int = MAX_SAMPLES,
        *,
        max_bytes: int = MAX_BYTES,
        name: str | None = None,
    ) -> None:
        """Show a run by ``name``, by default that of its directory, with so much of each mode's samples."""
        self._directory, self._name = RunDirectory(directory), name or directory.name
        self._max_samples, self._max_bytes = max_samples, max_bytes
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
                max_bytes=self._max_bytes,
            )
        self._left_out = [file for file in everything if file not in set(chosen)]
        self._shards = {file: (_state(file), self._shard(file)) for file in sorted(chosen)}

    def head(self) -> dict[str, Any]:
        """Return everything except the texts and tokens of the samples, ready for JSON."""
        problems: dict[tuple[Any, ...], int] = {}
        failures: dict[tuple[str, str], int] = {}
        components: dict[tuple[str, ...], int] = {}
        rows = [
            [
                *(shard, index, row.group, row.generation),
                problems.setdefault(row.problem, len(problems)),
                *(_rounded(row.reward), row.length, row.outcome),
                None if row.failure is None else failures.setdefault(row.failure, len(failures)),
                row.response,
                components.setdefault(tuple(name for name, _ in row.rewards), len(components)),
                [_rounded(value) for _, value in row.rewards],
            ]
            for shard, one in enumerate(self.shards)
            for index, row in enumerate(one.rows)
        ]
        columns = zip(*rows, strict=True) if rows else [()] * len(_ROW)
        return {
            "name": self._name,
            "state": run_state(self._directory),
            "configuration": run_configuration(self._directory),
            "evaluation": evaluated_groups(self._directory),
            "curves": read_curves(self._directory.metrics_path),
            "shards": [
                {
                    "mode": one.mode,
                    "step": one.step,
                    "dumped": self._count(file),
                    "shown": len(one.rows),
                    "excerpt_of": one.excerpt_of,
                }
                for file, (_, one) in self._shards.items()
            ],
            "left_out": [[file.mode, file.step] for file in self._left_out],
            "problems": list(problems),
            "failures": list(failures),
            "components": list(components),
            "rows": {name: list(values) for name, values in zip(_ROW, columns, strict=True)},
        }

    def _shard(self, file: SampleFile) -> Shard:
        state = _state(file)
        if file in self._shards and self._shards[file][0] == state:
            return self._shards[file][1]
        return read_shard(file, max_samples=self._max_samples, max_size=self._max_bytes)

    def _count(self, file: SampleFile) -> int:
        state = _state(file)
        if file not in self._num_lines or self._num_lines[file][0] != state:
            with file.path.open("rb") as lines:
                self._num_lines[file] = state, sum(1 for _ in lines)
        return self._num_lines[file][1]


def chosen_files(
    of_mode: Sequence[SampleFile],
    *,
    samples: Sequence[int],
    sizes: Sequence[int],
    max_samples: int,
    max_bytes: int = MAX_BYTES,
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
        fits = sum(samples[i] for i in indexes) <= max_samples and sum(sizes[i] for i in indexes) <= max_bytes
        if fits or len(indexes) == 1:
            return [of_mode[i] for i in indexes]
    raise AssertionError("strides end with the number of files")


def write_report(path: Path, runs: Sequence[RunData]) -> None:
    """Write the page of runs that are up to date. Raises ReportProblem, DiskFull or OSError."""
    assets, library = files(__package__) / "assets", chart_library()
    heads = [run.head() for run in runs]
    names = {name for head in heads for name in head["curves"]["values"]}
    head = {
        "stages": STEP_STAGES,
        "runs": heads,
        "meanings": with_meanings(names),
        "metrics_page": quote(os.path.relpath(metrics_page(), path.absolute().parent)),
        "library": f"Bokeh {library.version}",
        "scripts": len(library.packed),
    }
    data = [_data("head", packed(head))]
    data += [_data(f"script-{number}", script) for number, script in enumerate(library.packed)]
    data += [
        _data(f"shard-{number}-{index}", shard.packed)
        for number, run in enumerate(runs)
        for index, shard in enumerate(run.shards)
    ]
    parts = {
        "/*STYLE*/": (assets / "report.css").read_text(encoding="utf-8"),
        "<!--LICENCE-->": f"<!-- Bokeh draws the curves.\n\n{library.licence}\n-->",
        "<!--DATA-->": "\n".join(data),
        "/*SCRIPT*/": "\n".join(
            (assets / f"report_{name}.js").read_text(encoding="utf-8") for name in _SCRIPTS
        ),
    }
    page = (assets / "report.html").read_text(encoding="utf-8")
    for marker, part in parts.items():
        before, _, after = page.partition(marker)
        page = f"{before}{part}{after}"
    write_whole(path, page.encode(), "the report")


def write_comparison(named: Mapping[Path, str], path: Path) -> None:
    """Write the page of several runs, by their directories with a name for each; together they have as many
    samples as a page of one run. Raises ReportProblem, DiskFull or OSError."""
    share = len(named)
    runs = [
        RunData(directory, max(1, MAX_SAMPLES // share), max_bytes=MAX_BYTES // share, name=name)
        for directory, name in named.items()
    ]
    for run in runs:
        run.update()
    write_report(path, runs)


def _data(name: str, contents: str) -> str:
    return f'<script type="text/plain" id="{name}">{contents}</script>'


def _state(file: SampleFile) -> tuple[int, int]:
    """Return a file's time of modification and its size, which tell whether it has changed."""
    status = file.path.stat()
    return status.st_mtime_ns, status.st_size


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 5)
