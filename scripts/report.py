"""Write a page that shows one run, or compares several, in a browser without a network
(docs/how_to/report.md).

python scripts/report.py RUN_DIR                                  # writes RUN_DIR/report.html
python scripts/report.py RUN_DIR OTHER_RUN_DIR --output both.html
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nemo_like.observability.disk import DiskFull
from nemo_like.observability.printable import accept_all_characters, printable
from nemo_like.observability.run_directory import RunDirectory
from nemo_like_tools.report.run_page import MAX_SAMPLES, RunData, write_report
from nemo_like_tools.report.sample_files import ReportProblem


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page. Returns the exit code: 0, or 2 when it cannot be written."""
    accept_all_characters()
    options = _parse(arguments)
    runs = [RunData(path, options.max_samples) for path in options.run_dirs]
    output: Path = options.output or RunDirectory(options.run_dirs[0]).report_path
    try:
        for run in runs:
            run.update()
        write_report(output, runs)
    except (ReportProblem, DiskFull, OSError) as error:
        print(printable(f"report: {error}"), file=sys.stderr)
        return 2
    print(output)
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dirs", type=Path, nargs="+", metavar="RUN", help="the directory of a run")
    parser.add_argument("--output", type=Path, help="the file to write; needed with several runs")
    parser.add_argument(
        "--max-samples",
        type=int,
        default=MAX_SAMPLES,
        help=f"samples of a run's training, and of its validations (default {MAX_SAMPLES:,})",
    )
    options = parser.parse_args(arguments)
    if options.max_samples < 1:
        parser.error(f"--max-samples={options.max_samples} must be at least 1")
    if len(options.run_dirs) > 1 and options.output is None:
        parser.error("several runs make one page; say where with --output FILE.html")
    options.run_dirs = [path.absolute() for path in options.run_dirs]
    return options


if __name__ == "__main__":
    sys.exit(main())
