"""A report as Markdown, for docs/explanation/performance.md."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_MILLISECONDS = ("first_put_ms", "fetch_ms", "step_ms")


def as_markdown(report: Mapping[str, Any]) -> str:
    """Times per shape and plane, how many times faster, what our step is spent on."""
    parts = [_times(report["results"]), _faster(report["times_faster"]), _spent(report["spent_ms"])]
    if "rows_at_constant_bytes" in report:
        parts.append(_growth(report["rows_at_constant_bytes"]))
    return "\n\n".join(parts)


def _times(results: Sequence[Mapping[str, Any]]) -> str:
    """One row per plane: put / fetch / step in ms for each shape."""
    shapes = list(dict.fromkeys(one["shape"] for one in results))
    planes = list(dict.fromkeys(one["plane"] for one in results))
    times = {(one["shape"], one["plane"]): one for one in results}
    rows = []
    for plane in planes:
        cells = [" / ".join(f"{times[shape, plane][name]:.0f}" for name in _MILLISECONDS) for shape in shapes]
        rows.append([f"`{plane}`", *cells])
    return _table(["put / fetch / step, ms", *shapes], rows)


def _faster(times_faster: Mapping[str, Mapping[str, float]]) -> str:
    names = list(next(iter(times_faster.values())))
    rows = [[name, *(f"{of_shape[name]:.1f}" for of_shape in times_faster.values())] for name in names]
    return _table(["times faster", *times_faster], rows)


def _spent(spent: Mapping[str, Mapping[str, Mapping[str, float]]]) -> str:
    first = next(iter(spent.values()))
    flows = list(first)
    names = list(first[flows[0]])
    rows = [
        [f"`{flow}` {name}", *(f"{of_shape[flow][name]:g}" for of_shape in spent.values())]
        for flow in flows
        for name in names
    ]
    return _table(["ms of a step", *spent], rows)


def _growth(growth: Mapping[str, Any]) -> str:
    shapes = list(next(iter(growth["cpu_ms"].values())))
    rows = [
        [f"`{plane}`", *(f"{of_plane[shape]:.0f}" for shape in shapes), f"{growth['growth'][plane]:.2f}"]
        for plane, of_plane in growth["cpu_ms"].items()
    ]
    return _table(["CPU ms of a step", *shapes, "growth"], rows)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
