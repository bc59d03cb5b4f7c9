"""Runs a script up to the point where it has read its arguments."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.unit.forked import in_fork

_READ = "arguments read"


def unread(words: Sequence[str], directory: Path, output: Path) -> str:
    """Run the script ``words[0]`` with its arguments, the other words, in ``directory``; return what it says
    when it refuses them, or nothing when it reads them. ``output`` is a file for that."""
    code, told = in_fork(partial(_read, words, directory), directory, output)
    is_read = code == 0 and told.splitlines()[-1:] == [_READ]
    return "" if is_read else f"exit code {code}: {told}"


def _read(words: Sequence[str], directory: Path) -> None:
    for name in ("parse_args", "parse_intermixed_args"):
        _stop_when_read(name)
    sys.argv[:] = words
    sys.path[0] = str((directory / words[0]).parent)
    runpy.run_path(words[0], run_name="__main__")


def _stop_when_read(name: str) -> None:
    read = getattr(argparse.ArgumentParser, name)

    def then_stop(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        read(parser, *args, **kwargs)  # ends the process when it refuses them
        print(_READ)
        sys.exit(0)

    setattr(argparse.ArgumentParser, name, then_stop)
