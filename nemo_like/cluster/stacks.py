"""Stacks of the actors' processes on this machine, taken from outside: no process need answer a call.

A process belongs to an actor when its standard error is the actor's log, as it is for the actor's own process
and for processes that it started. Actors that an actor started have their own logs, in the folder named like
that actor's log without ".log". py-spy reads the stacks if it may look into the process; where it may not, a
process that called ``dump_stacks_on_signal`` writes them itself.
"""

from __future__ import annotations

import faulthandler
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from nemo_like.config.secrets import masked
from nemo_like.observability.exits import how_it_ended

_SIGNAL = signal.SIGUSR2
_PY_SPY_TIMEOUT_S = 10.0
# How long a process has to write its stacks after the signal; it writes them without running any Python.
_SIGNAL_GRACE_S = 1.0
_NUM_SHOWN_FRAMES = 4
_PACKAGE = f"{os.sep}nemo_like{os.sep}"
# Files whose code calls the methods of an actor, and looks after its log.
_SHELL = (
    os.path.join("nemo_like", "cluster", "actors.py"),
    os.path.join("nemo_like", "observability", "bounded_log.py"),
)


@dataclass(frozen=True, slots=True)
class Frame:
    """One frame of a stack: a line of the code that is being run."""

    function: str
    path: str
    line: int

    def __str__(self) -> str:
        return f"{self.function} ({'/'.join(Path(self.path).parts[-2:])}:{self.line})"

    @property
    def is_shell(self) -> bool:
        return self.path.endswith(_SHELL)

    @property
    def is_call(self) -> bool:
        """Whether this frame calls a method of an actor."""
        return self.is_shell and self.function.rpartition(".")[2] in ("call", "_call")


@dataclass(frozen=True, slots=True)
class Thread:
    """One thread of a process; ``frames`` are innermost first."""

    name: str
    frames: tuple[Frame, ...]

    @property
    def is_in_call(self) -> bool:
        return any(frame.is_call for frame in self.frames)

    @property
    def runs_our_code(self) -> bool:
        return any(_PACKAGE in frame.path and not frame.is_shell for frame in self.frames)


@dataclass(frozen=True, slots=True)
class ProcessDump:
    """The stacks of one process of an actor; where ``threads`` is empty, ``problem`` says why."""

    actor: str
    pid: int
    state: str  # "sleeping", "running", "stopped", "disk-sleep", ...
    command: str
    threads: tuple[Thread, ...]
    problem: str = ""

    @property
    def is_stopped(self) -> bool:
        return self.state in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)

    @property
    def is_in_call(self) -> bool:
        """Whether any thread runs a method of the actor."""
        return any(thread.is_in_call for thread in self.threads)

    def summary(self) -> str:
        """Return one line with the process and the innermost frames of its most telling thread."""
        who = f"{self.actor} (process {self.pid}, {self.state})"
        shown = _most_telling(self.threads)
        if shown is None:
            return f"{who}: {self.problem}"
        frames = [str(frame) for frame in shown.frames if not frame.is_shell]
        return f"{who}: {' < '.join(frames[:_NUM_SHOWN_FRAMES])}"

    def text(self) -> str:
        """Return the stacks of every thread, innermost frame first."""
        lines = [f"{self.actor}: process {self.pid}, {self.state}: {self.command}"]
        if self.problem:
            lines.append(f"  {self.problem}")
        for thread in self.threads:
            lines += [f"  thread {thread.name}", *(f"    {frame}" for frame in thread.frames)]
        return "\n".join(lines)


def dump_stacks_on_signal() -> None:
    """Let SIGUSR2 make this process write the stacks of all its threads to standard error from now on."""
    faulthandler.register(_SIGNAL, all_threads=True)


def dump_processes(log_paths: Mapping[str, str]) -> list[ProcessDump]:
    """Return the stacks of every process on this machine that belongs to one of the actors.

    ``log_paths`` maps an actor's name to the path of its log.
    """
    return [_dump(actor, process) for actor, process in _processes(log_paths)]


def kill_processes(log_paths: Mapping[str, str]) -> None:
    """Kill every process on this machine that belongs to one of the actors, stopped ones too.

    ``log_paths`` maps an actor's name to the path of its log.
    """
    for _, process in _processes(log_paths):
        try:
            process.kill()
        except psutil.NoSuchProcess:
            continue


def _processes(log_paths: Mapping[str, str]) -> Iterator[tuple[str, psutil.Process]]:
    actors = {os.path.realpath(path): actor for actor, path in log_paths.items()}
    for process in psutil.process_iter():
        try:
            path = os.readlink(f"/proc/{process.pid}/fd/2")
        except OSError:  # gone, or another user's
            continue
        folder, name = os.path.split(path)
        if path in actors:
            yield actors[path], process
        elif f"{folder}.log" in actors:
            yield f"{actors[f'{folder}.log']}'s {name.removesuffix('.log')}", process


def _dump(actor: str, process: psutil.Process) -> ProcessDump:
    try:
        state, command = process.status(), masked(" ".join(process.cmdline()).strip())[:200]
    except psutil.NoSuchProcess:
        return ProcessDump(actor, process.pid, "gone", "", (), "it ended while it was looked at")
    threads, problem = _ask_py_spy(process.pid)
    if not threads:
        threads, why_not = _ask_itself(process.pid)
        problem = "" if threads else f"{problem}; {why_not}"
    return ProcessDump(actor, process.pid, state, command, threads, problem)


def _ask_py_spy(pid: int) -> tuple[tuple[Thread, ...], str]:
    """Return the threads that py-spy sees, or none and the reason."""
    program = shutil.which("py-spy", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        return (), "py-spy is not installed"
    # --nonblocking: py-spy must not stop the process, since a stopped process cannot be stopped again.
    command = [program, "dump", "--nonblocking", "--json", "--pid", str(pid)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PY_SPY_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return (), f"py-spy did not end within {_PY_SPY_TIMEOUT_S:g} s"
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        return (), f"py-spy: {lines[0] if lines else how_it_ended(done.returncode)}"
    threads = tuple(_py_spy_threads(json.loads(done.stdout)))
    return threads, "" if threads else "py-spy found no Python thread"


def _py_spy_threads(dump: Iterable[Mapping]) -> Iterator[Thread]:
    for thread in dump:
        frames = (Frame(frame["name"], frame["filename"], frame["line"]) for frame in thread["frames"])
        yield Thread(thread["thread_name"] or str(thread["thread_id"]), tuple(frames))


def _ask_itself(pid: int) -> tuple[tuple[Thread, ...], str]:
    """Signal the process and return the threads that it writes to its log, or none and the reason."""
    if not _catches_signal(pid):
        return (), "it does not write its stacks itself, since it never registered for that"
    log = Path(os.readlink(f"/proc/{pid}/fd/2"))
    size = log.stat().st_size
    os.kill(pid, _SIGNAL)
    # A plain wait, since nothing tells when the process has written.
    threading.Event().wait(_SIGNAL_GRACE_S)
    with log.open(encoding="utf-8", errors="replace") as file:
        file.seek(size)
        written = tuple(faulthandler_threads(file.read()))
    return written, f"it did not write its stacks itself within {_SIGNAL_GRACE_S:g} s of the signal"


def _catches_signal(pid: int) -> bool:
    """Return whether the process has a handler for the signal; without one the signal would end it."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (_SIGNAL - 1) & 1)


def faulthandler_threads(text: str) -> Iterator[Thread]:
    """Yield the threads in a text that faulthandler wrote."""
    name, frames = "", list[Frame]()
    for line in text.splitlines():
        if head := re.match(r"(?:Current thread|Thread) (0x[0-9a-f]+)", line):
            if frames:
                yield Thread(name, tuple(frames))
            name, frames = head[1], []
        elif frame := re.match(r'  File "(.*)", line (\d+) in (.*)', line):
            frames.append(Frame(frame[3], frame[1], int(frame[2])))
    if frames:
        yield Thread(name, tuple(frames))


def _most_telling(threads: Iterable[Thread]) -> Thread | None:
    """Return the thread that runs a call; else one that runs this package's code; else the main one.

    Failing those, return any thread with frames, and None when there is none.
    """
    candidates = [thread for thread in threads if thread.frames]
    in_call = [thread for thread in candidates if thread.is_in_call]
    ours = [thread for thread in candidates if thread.runs_our_code]
    main = [thread for thread in candidates if thread.name == "MainThread"]
    return next(iter([*in_call, *ours, *main, *candidates]), None)
