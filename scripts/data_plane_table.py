#!/usr/bin/env python
"""Print a table of what a run's data plane did: calls, bytes, latency, throughput per operation and column.

    python scripts/data_plane_table.py RUN_DIR [--step N]

Calls and bytes are summed over the steps. p50, p95 and GB/s are medians of the steps' figures; max is the
largest of all steps.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from rich.console import Console
from rich.table import Table

from nemo_like.observability.jsonl import read_metrics
from nemo_like.observability.printable import accept_all_characters, warn_on_stderr

_PREFIX = "data_plane/"


def main() -> int:
    accept_all_characters()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--step", type=int, help="this step alone")
    options = parser.parse_args()
    path = options.run_dir / "metrics.jsonl"
    if not path.is_file():
        print(f"{path} does not exist; give the directory of a run", file=sys.stderr)
        return 2
    records = [
        record for record in read_metrics(path, warn_on_stderr) if options.step in (None, record["step"])
    ]
    groups = operation_groups(records)
    if not groups:
        print(f"{path} has no {_PREFIX} metrics: data_plane.log_operations=false?", file=sys.stderr)
        return 1
    console = Console()
    console.print(table(groups))
    return 0


def operation_groups(records: Sequence[dict[str, Any]]) -> dict[str, dict[str, list[float]]]:
    """Return, for each operation ("put") or column of one ("put/input_ids"), the values of each statistic
    step by step."""
    groups: dict[str, dict[str, list[float]]] = {}
    for record in records:
        for name, value in record.items():
            if name.startswith(_PREFIX):
                group, _, statistic = name.removeprefix(_PREFIX).rpartition("/")
                groups.setdefault(group, {}).setdefault(statistic, []).append(value)
    return groups


def table(groups: dict[str, dict[str, list[float]]]) -> Table:
    """Make a table with a line per operation, and below it one per column."""
    result = Table()
    for title in ("operation", "column"):
        result.add_column(title)
    for title in ("calls", "MB", "p50 ms", "p95 ms", "max ms", "GB/s"):
        result.add_column(title, justify="right")
    for group, values in sorted(groups.items()):
        operation, _, column = group.partition("/")
        result.add_row(
            "" if column else operation,
            column,
            f"{sum(values['count']):.0f}",
            f"{sum(values['bytes']) / 1e6:.2f}" if "bytes" in values else "",
            f"{1e3 * statistics.median(values['latency_p50_s']):.2f}",
            f"{1e3 * statistics.median(values['latency_p95_s']):.2f}",
            f"{1e3 * max(values['latency_max_s']):.2f}",
            f"{statistics.median(values['gb_per_s']):.3f}" if "gb_per_s" in values else "",
        )
    return result


if __name__ == "__main__":
    sys.exit(main())
