"""Finds out whether C can be compiled on this machine, as every engine on a GPU needs.

Triton compiles C when a process first uses a GPU. It takes the compiler that ``CC`` names, else gcc, else
clang, and includes Python's headers (``triton/runtime/build.py``).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig

from nemo_like.observability.exits import how_it_ended

_TIMEOUT_S = 30.0
_HEADERS = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"
REMEDY = f"install gcc and Python's headers (on Debian and Ubuntu gcc, libc6-dev and {_HEADERS})"


def compiling_problem() -> str | None:
    """Return why C code that includes Python.h cannot be compiled on this machine; None where it can."""
    compiler = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        return "there is no C compiler: neither gcc nor clang, and CC names none"
    command = [compiler, "-fsyntax-only", f"-I{sysconfig.get_path('include')}", "-x", "c", "-"]
    try:
        done = subprocess.run(
            command,
            input="#include <Python.h>\n",
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{compiler} cannot be used: {error}"
    if not done.returncode:
        return None
    said = next(iter(done.stderr.strip().splitlines()), how_it_ended(done.returncode))
    return f"{compiler} cannot compile what includes Python.h: {said}"
