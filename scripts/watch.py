"""Watch a run that is under way elsewhere, by its run directory: what its own terminal shows, until it ends.

    python scripts/watch.py RUN_DIR           # follows the run; Ctrl-C ends the watching, not the run
    python scripts/watch.py RUN_DIR --once    # prints how it is doing, and exits
    python scripts/watch.py runs/slurm-42     # the run of a Slurm job

Any machine that sees the directory will do.

Exits as the run does (docs/reference/exit_codes.md has the codes), with 1 when it died, and with 2 for a
directory that is none of a run. With --once, a run that goes on gives 0.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console as Terminal

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from nemo_like.driver.exit_codes import FINISHED, INTERRUPTED, REFUSED
from nemo_like.observability.console import make_console
from nemo_like.observability.options import ConsoleMode
from nemo_like.observability.printable import accept_all_characters, printable
from nemo_like.observability.run_panel import RunPanel
from nemo_like.observability.summary import RunSummary, format_summary
from nemo_like_tools.watch.followed_run import FollowedRun, NoRunDirectory, SeenEnd, find_run

# File systems that several machines share do not tell of changes: the files are looked at again and again.
_PERIOD_S = 1.0
_EARLIER_NOTES = 5


def main(arguments: Sequence[str] | None = None) -> int:
    """Show the run. Returns the exit code."""
    accept_all_characters()
    options = _parse(arguments)
    try:
        run = FollowedRun(find_run(options.run_dir))
        if options.once and run.end is None:
            return _show_once(run)
        end = run.end or _follow(run)
    except (NoRunDirectory, OSError) as error:
        print(f"watch: {error}", file=sys.stderr)
        return REFUSED
    except KeyboardInterrupt:
        print("no longer watching; the run goes on", file=sys.stderr)
        return INTERRUPTED
    paths = {label: str(path) for label, path in run.directory.outputs().items()}
    print(printable("\n".join(format_summary(RunSummary(outcome=end.outcome), run.progress, paths))))
    print(f"run_dir: {run.directory.path}")
    return end.exit_code


def _show_once(run: FollowedRun) -> int:
    terminal = Terminal(highlight=False)
    for note in run.notes[-_EARLIER_NOTES:]:
        terminal.print(printable(note), markup=False, soft_wrap=True)
    terminal.print(RunPanel(run.directory.name, run.progress).render())
    terminal.print(f"running: {run.process}", markup=False, soft_wrap=True)
    return FINISHED


def _follow(run: FollowedRun) -> SeenEnd:
    """Show the run until it ends, or is found to have died: it gives signs of life while it goes on."""
    console = make_console(ConsoleMode.auto, sys.stdout, run.directory.name, run.progress)
    try:
        for note in run.notes[-_EARLIER_NOTES:]:
            console.note(note)
        while (end := run.end) is None:
            time.sleep(_PERIOD_S)
            run.update(console)
    finally:
        console.close()
    return end


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "run_dir", type=Path, metavar="RUN", help="the directory of the run, or of a Slurm job"
    )
    parser.add_argument("--once", action="store_true", help="print how the run is doing, and exit")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
