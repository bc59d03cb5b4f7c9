"""Starts a sweep of short runs: start_sweep.py CONFIG ARGUMENTS..."""

from __future__ import annotations

import sys
from pathlib import Path

from nemo_like.configuration import load_sweep
from nemo_like.sweep.multirun import run_sweep
from nemo_like_tools.report.run_page import write_comparison

SHORT_RUN = Path(__file__).with_name("short_run.py")

if __name__ == "__main__":
    config = Path(sys.argv[1])
    sys.exit(run_sweep(SHORT_RUN, config, load_sweep(config, sys.argv[2:]), write_comparison))
