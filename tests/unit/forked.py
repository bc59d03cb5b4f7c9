"""Runs a program in a fork of this process, which has at once most of what the program imports."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import pytest

_TIMEOUT_S = 120.0


def in_fork(program: Callable[[], object], directory: Path, output: Path) -> tuple[int | None, str]:
    """Call ``program`` in ``directory``, in a fork; return the fork's exit code and what it printed.

    The exit code is the integer that ``program`` returns, or 0 when it returns anything else; it is None when
    the fork was killed at the deadline. ``output`` is a file for what it prints.
    """
    process = get_context("fork").Process(target=_run, args=(program, directory, output), daemon=True)
    process.start()
    process.join(_TIMEOUT_S)
    code = process.exitcode
    if code is None:
        process.kill()
    return code, output.read_text() if output.is_file() else ""


def _run(program: Callable[[], object], directory: Path, output: Path) -> None:
    os.chdir(directory)
    with output.open("w") as file:
        for standard in (1, 2):
            os.dup2(file.fileno(), standard)
    sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
    code = program()
    sys.exit(code if isinstance(code, int) else 0)


def collected(*arguments: str, directory: Path, output: Path) -> tuple[int | None, str]:
    """Have pytest collect the tests that ``arguments`` choose; return its exit code and what it printed."""
    quietly = ("--collect-only", "-p", "no:cacheprovider", "-p", "no:xdist", "--disable-warnings")
    return in_fork(lambda: int(pytest.main([*arguments, *quietly])), directory, output)
