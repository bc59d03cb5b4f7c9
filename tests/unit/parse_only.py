"""Run a script up to the point where it has read its arguments: ``parse_only.py SCRIPT ARGUMENTS``."""

from __future__ import annotations

import argparse
import runpy
import sys
from pathlib import Path
from typing import Any

READ = "arguments read"


def _stop_when_read(name: str) -> None:
    read = getattr(argparse.ArgumentParser, name)

    def then_stop(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        read(parser, *args, **kwargs)  # ends the process when it refuses them
        print(READ)
        sys.exit(0)

    setattr(argparse.ArgumentParser, name, then_stop)


if __name__ == "__main__":
    _stop_when_read("parse_args")
    _stop_when_read("parse_intermixed_args")
    del sys.argv[0]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name="__main__")
