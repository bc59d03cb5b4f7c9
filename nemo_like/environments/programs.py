"""Running other people's Python: one process per program, with limits on time, memory, files and network.

Limits come from util-linux, so that nothing has to run between fork and exec: ``prlimit`` for memory,
processor time and file sizes, ``unshare`` for a network of its own without any interface (and process
ids of its own, so that what the program starts ends with it), ``setpriv`` so that it ends when this
process does. They protect against programs that are wrong, not against those that attack the system.
"""

from __future__ import annotations

import asyncio
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_MAX_OUTPUT_BYTES = 1_000_000
_PROBE_TIMEOUT_S = 10.0
_OWN_NETWORK = ("unshare", "--net", "--pid", "--fork", "--kill-child")
_UNPRIVILEGED = ("--user", "--map-root-user")


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    timeout_s: float
    memory_mib: int


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """``exit_code`` is None when the time ran out."""

    exit_code: int | None
    stdout: str


@cache
def network_wall() -> tuple[str, ...]:
    """The command prefix that takes the network away; empty where the system does not permit it."""
    for prefix in (_OWN_NETWORK, (*_OWN_NETWORK, *_UNPRIVILEGED)):
        if shutil.which(prefix[0]) and _works([*prefix, "true"]):
            return prefix
    return ()


async def run_program(source: str, stdin: str, limits: ProgramLimits) -> ProgramResult:
    """Run a program in an empty directory of its own, which is removed again."""
    with tempfile.TemporaryDirectory(prefix="program-") as directory:
        folder = Path(directory)
        (folder / "program.py").write_text(source, encoding="utf-8")
        (folder / "stdin").write_text(stdin, encoding="utf-8")
        with (folder / "stdin").open("rb") as given, (folder / "stdout").open("wb") as written:
            process = await asyncio.create_subprocess_exec(
                *_command(limits),
                cwd=folder,
                env={"PATH": os.environ.get("PATH", ""), "OMP_NUM_THREADS": "1", "HOME": directory},
                stdin=given,
                stdout=written,
                stderr=subprocess.DEVNULL,
                process_group=0,
            )
            exit_code = await _exit_code(process, limits.timeout_s)
        stdout = (folder / "stdout").read_bytes()[:_MAX_OUTPUT_BYTES]
    return ProgramResult(exit_code, stdout.decode(errors="replace"))


async def _exit_code(process: asyncio.subprocess.Process, timeout_s: float) -> int | None:
    """None after the deadline. The process and its group are gone in any case."""
    try:
        return await asyncio.wait_for(process.wait(), timeout_s)
    except TimeoutError:
        return None
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()


def _command(limits: ProgramLimits) -> list[str]:
    return [
        *("setpriv", "--pdeathsig", "KILL"),
        *network_wall(),
        "prlimit",
        f"--as={limits.memory_mib * 2**20}",
        f"--cpu={math.ceil(limits.timeout_s)}",
        f"--fsize={_MAX_OUTPUT_BYTES}",
        "--core=0",
        *(sys.executable, "-I", "program.py"),
    ]


def _works(command: list[str]) -> bool:
    try:
        done = subprocess.run(command, capture_output=True, timeout=_PROBE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
