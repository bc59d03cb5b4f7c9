#!/usr/bin/env python
"""A GRPO step's traffic through the data plane, against TransferQueue used plainly, Ray and memcpy.

    python scripts/bench/data_plane.py [--shapes 128x512,512x2048,2048x4096] [--backend simple|mooncake_cpu]
                                       [--out FILE] [--markdown] [--quick]

A shape is rows x longest sample; lengths are uniform between a quarter of that and all of it. A step is
a first put of five columns, two write-backs and three fetches by DP workers, and tags by the driver,
between real processes. Planes:

    ours                  this framework's data plane; every stage fetches again, the driver reads and
                          writes columns, as usual integrations do
    ours_as_used          the same plane as this framework's driver uses it: one phase writes both columns
                          of log-probs, in the background, workers keep what they fetched or wrote,
                          advantages are scalars in the metadata
    transfer_queue_plain  TransferQueue's own calls, a key per sample, jagged tensors
    ray_object_store      dictionaries of padded tensors in Ray's object store
    memcpy                a warm copy of our bytes within one process

All are measured in one run in turn; numbers are medians. Every fetched value is checked once before.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench.arguments import at_least
from scripts.bench.data_plane_bench.batch import Shape
from scripts.bench.data_plane_bench.cluster import Bench, started
from scripts.bench.data_plane_bench.measure import checked, cpu_growth, ratios, record, spent, timings
from scripts.bench.data_plane_bench.tables import as_markdown

_GROWTH_SHAPES = (Shape(512, 2048), Shape(4096, 256))  # equal bytes
_DATA_PARALLEL = (1, 2, 4)


def main() -> int:
    options = _options()
    with started(options.backend, max(_DATA_PARALLEL), options.tensor_dtypes) as bench:
        report = measure(bench, options)
    text = json.dumps(report, indent=2)
    if options.out:
        Path(options.out).write_text(text + "\n", encoding="utf-8")
    print(as_markdown(report) if options.markdown else text)
    return 0


def measure(bench: Bench, options: argparse.Namespace) -> dict[str, Any]:
    """Everything that the options ask for; ``results`` are at ``--data-parallel`` workers."""
    results: list[dict[str, Any]] = []
    by_workers: list[dict[str, Any]] = []
    faster: dict[str, dict[str, float]] = {}
    spending: dict[str, Any] = {}
    for shape in options.shapes:
        counts = (options.data_parallel,) if options.quick else _DATA_PARALLEL
        for num_workers in counts:
            checked(bench, shape, num_workers)
            is_main = num_workers == options.data_parallel
            timing = timings(bench, num_workers, options.repetitions if is_main else 3)
            records = [record(shape, plane, one, options.tensor_dtypes) for plane, one in timing.items()]
            by_workers += [{"data_parallel": num_workers, **one} for one in records]
            if is_main:
                results += records
                faster[str(shape)] = ratios(timing)
        spending[str(shape)] = spent(bench, shape, options.data_parallel, options.repetitions)
    report = {
        "backend": options.backend,
        "data_parallel": options.data_parallel,
        "tensor_dtypes": options.tensor_dtypes,
        "repetitions": options.repetitions,
        "results": results,
        "times_faster": faster,
        "spent_ms": spending,
    }
    if not options.quick:
        report["by_data_parallel"] = by_workers
        report["rows_at_constant_bytes"] = cpu_growth(
            bench, _GROWTH_SHAPES, options.data_parallel, options.repetitions
        )
    return report


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--shapes",
        type=lambda text: [Shape.parse(one) for one in text.split(",")],
        default="128x512,512x2048,2048x4096",
    )
    parser.add_argument("--backend", choices=("simple", "mooncake_cpu"), default="simple")
    parser.add_argument("--out", help="write the JSON there, too")
    parser.add_argument("--data-parallel", type=int, choices=_DATA_PARALLEL, default=2)
    parser.add_argument("--repetitions", type=at_least(1), default=7)
    parser.add_argument(
        "--tensor-dtypes",
        choices=("int64", "narrow"),
        default="int64",
        help="of ids and masks in the planes that carry tensors: int64 as trainers use them, or int32 and "
        "uint8 as this framework stores them",
    )
    parser.add_argument(
        "--quick", action="store_true", help="one number of workers, no growth with the number of rows"
    )
    parser.add_argument("--markdown", action="store_true", help="print tables instead of JSON")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
