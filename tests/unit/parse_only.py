"""Runs a script up to the point where it has read its arguments."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

_READ = "arguments read"
_TIMEOUT_S = 120.0


def unread(words: Sequence[str], directory: Path, output: Path) -> str:
    """Run the script ``words[0]`` with its arguments, the other words, in ``directory``; return what it says
    when it refuses them, or nothing when it reads them. ``output`` is a file for that.

    The script runs in a fork of this process, which has most of what it imports.
    """
    process = get_context("fork").Process(target=_read, args=(words, directory, output), daemon=True)
    process.start()
    process.join(_TIMEOUT_S)
    if process.exitcode is None:
        process.kill()
    told = output.read_text() if output.is_file() else ""
    is_read = process.exitcode == 0 and told.splitlines()[-1:] == [_READ]
    return "" if is_read else f"exit code {process.exitcode}: {told}"


def _read(words: Sequence[str], directory: Path, output: Path) -> None:
    os.chdir(directory)
    with output.open("w") as file:
        for standard in (1, 2):
            os.dup2(file.fileno(), standard)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
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
