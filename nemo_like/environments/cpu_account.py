"""Measures how much CPU time a program's processes have used, and whether they wait for a CPU.

A program's processes are the one that was started and all below it. When a control group is delegated to this
process (cgroup v2, https://docs.kernel.org/admin-guide/cgroup-v2.html), the program gets a group of its own,
which counts the CPU time of every process that was ever in it. Otherwise the processes are read from /proc at
intervals; a process that lives and ends between two reads, without a parent waiting for it, is missed.
"""

from __future__ import annotations

import os
import secrets
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

# Fields of /proc/PID/stat behind the name in parentheses: the state, and the times of a process and of the
# children that it waited for, in ticks.
_STATE, _TIMES, _CHILDRENS_TIMES = 0, (11, 12), (13, 14)
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_RUNNABLE = "R"
# Moves the process itself into a control group, then becomes the command.
_ENTER = ("/bin/sh", "-c", 'echo 0 > "$0" && exec "$@"')

_TRIAL_TIMEOUT_S = 10.0

_unremoved: set[Path] = set()


@dataclass(frozen=True, slots=True)
class Look:
    """The CPU use of some processes at one time."""

    cpu_s: float  # used so far, by all processes together
    is_waiting: bool  # whether a thread runs, or waits for nothing but a CPU


@dataclass(slots=True)
class ProcessTrees:
    """The processes ``roots`` and all processes below them, as /proc shows them."""

    roots: Sequence[int]
    _own_s: dict[int, float] = field(default_factory=dict)  # by process: its CPU time when last seen

    def look(self) -> Look:
        alive_s, is_waiting = 0.0, False
        found = list(self.roots)
        for process in found:  # grows on the way
            with suppress(OSError, ValueError, IndexError):
                times = _stat(f"/proc/{process}/stat")
                own_s = _seconds(times, _TIMES)
                alive_s += own_s + _seconds(times, _CHILDRENS_TIMES)
                self._own_s[process] = own_s
                for thread in os.listdir(f"/proc/{process}/task"):
                    folder = f"/proc/{process}/task/{thread}"
                    is_waiting = is_waiting or _stat(f"{folder}/stat")[_STATE] == _RUNNABLE
                    found += map(int, _read(f"{folder}/children").split())
        # A child that ended counts in the process that waited for it, or else as it was when last seen.
        return Look(max(alive_s, sum(self._own_s.values())), is_waiting)


class ControlGroup:
    """The control group of one program."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def entered(self, command: Sequence[str]) -> list[str]:
        """Return a command that enters the group and then becomes ``command``."""
        return [*_ENTER, str(self._path / "cgroup.procs"), *command]

    def cpu_s(self) -> float:
        """Return the CPU time of all processes that have been in the group."""
        counts = dict(line.split() for line in _read(self._path / "cpu.stat").splitlines())
        return int(counts["usage_usec"]) / 1e6


@contextmanager
def control_group() -> Iterator[ControlGroup | None]:
    """Make a control group for the block; yield None when this process may not make one.

    Processes that are still in the group at the end of the block are killed.
    """
    parent = _delegated()
    if parent is None:
        yield None
        return
    for path in list(_unremoved):
        _remove(path)
    path = _new_path(parent)
    try:
        path.mkdir()
    except OSError:  # the machine's owner may limit their number
        yield None
        return
    try:
        yield ControlGroup(path)
    finally:
        with suppress(OSError):
            (path / "cgroup.kill").write_text("1")
        _remove(path)


@cache
def _delegated() -> Path | None:
    """Return this process's own control group if it may make groups below it and move processes into them,
    else None."""
    mounts = [line.split() for line in _read("/proc/self/mountinfo").splitlines()]
    mounted = [mount[4] for mount in mounts if "cgroup2" in mount[mount.index("-") :]]
    own = [line[3:] for line in _read("/proc/self/cgroup").splitlines() if line.startswith("0::")]
    if not mounted or not own:
        return None
    path = Path(mounted[0] + own[0])
    trial = _new_path(path)
    try:
        trial.mkdir()
    except OSError:
        return None
    try:
        group = ControlGroup(trial)
        group.cpu_s()
        # Rights alone do not suffice: a group may take no processes.
        command = group.entered(["true"])
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL, timeout=_TRIAL_TIMEOUT_S)
        return path
    except (OSError, KeyError, subprocess.SubprocessError):
        return None
    finally:
        _remove(trial)
        _remove_left_behind(path)


def _new_path(parent: Path) -> Path:
    return parent / f"program-{os.getpid()}-{secrets.token_hex(4)}"


def _remove_left_behind(parent: Path) -> None:
    """Remove the groups that killed processes left behind."""
    for path in parent.glob("program-*-*"):
        if not os.path.exists(f"/proc/{path.name.split('-')[1]}"):
            _remove(path)


def _remove(path: Path) -> None:
    """Remove a group. If a process in it has not ended yet, the next ``control_group`` tries again."""
    try:
        path.rmdir()
        _unremoved.discard(path)
    except OSError:
        _unremoved.add(path)


def _stat(path: str) -> list[str]:
    return _read(path).rpartition(")")[2].split()


def _seconds(stat: Sequence[str], places: Sequence[int]) -> float:
    return sum(int(stat[place]) for place in places) / _TICKS_PER_S


def _read(path: str | Path) -> str:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
