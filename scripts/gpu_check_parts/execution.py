"""Runs a command with a deadline, and finds what it left running.

Every process of a part inherits a mark in its environment, also those that Ray and vLLM start in sessions of
their own. So the check ends exactly its own processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.gpu_check_parts.settings import ROOT

MARK = "NEMO_LIKE_GPU_CHECK"
# After its deadline a command is asked to stop, and killed when it has not within this time.
_STOP_S = 20.0
# The processes of a command that has ended have this long to end, too.
_LEAVE_S = 10.0
_TAIL_LINES = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """How a command ended."""

    command: Sequence[str]
    returncode: int | None  # None: it was past its deadline, or the check was interrupted
    seconds: float
    log: Path
    left: Sequence[str]  # command lines of processes that it left behind, which were killed
    is_interrupted: bool = False

    def reasons(self, what: str) -> list[str]:
        """Return what is off about the command itself, with the end of its output."""
        found = []
        if self.is_interrupted:
            found.append(f"{what} was interrupted after {self.seconds:.0f} s{self._said()}")
        elif self.returncode is None:
            found.append(f"{what} was past its deadline after {self.seconds:.0f} s{self._said()}")
        elif self.returncode:
            found.append(f"{what} ended with code {self.returncode}{self._said()}")
        if self.left:
            found.append(f"{what} left {len(self.left)} processes, which were killed: {'; '.join(self.left)}")
        return found

    def _said(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:]
        return f" ({self.log}):" + "".join(f"\n    {line[:200]}" for line in lines)


def run(
    command: Sequence[str], *, deadline_s: float, log: Path, mark: str, grace_s: float = _LEAVE_S
) -> Done:
    """Run the command in the repository, with its output in ``log``; return when nothing of it is left.

    What it started has ``grace_s`` after its end to end too. An interrupt ends it as its deadline does.
    """
    returncode: int | None = None
    is_interrupted = False
    log.parent.mkdir(parents=True, exist_ok=True)
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", MARK: mark}
    started_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            returncode = process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            pass
        except KeyboardInterrupt:
            is_interrupted = True
        finally:
            _stop(process)
            left = end_marked(mark, grace_s)
    seconds = time.monotonic() - started_s
    return Done(
        command=command,
        returncode=returncode,
        seconds=seconds,
        log=log,
        left=left,
        is_interrupted=is_interrupted,
    )


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def end_marked(mark: str, grace_s: float) -> list[str]:
    """Kill the processes with this mark that do not end by themselves; return their command lines."""
    left = _wait_for_end(mark, grace_s, signal_number=0)
    if left:
        _wait_for_end(mark, _STOP_S, signal.SIGKILL)
    return list(left.values())


def _wait_for_end(mark: str, timeout_s: float, signal_number: int) -> dict[int, str]:
    """Send the processes with this mark the signal until none is left; 0 is none. Return those left."""
    deadline = time.monotonic() + timeout_s
    while (left := marked(mark)) and time.monotonic() < deadline:
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal_number)
        time.sleep(0.1)
    return left


def marked(mark: str) -> dict[int, str]:
    """Return the command lines of the live processes that have the mark in their environment, by id."""
    wanted = f"{MARK}={mark}".encode()
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if int(entry.name) != os.getpid() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found[int(entry.name)] = words.strip()[:120]
        except OSError:
            continue  # it has ended, or belongs to somebody else
    return found
