"""What a run leaves on the machine: names in shared memory, processes, listening ports, files."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from tests.functional.runs import MARK, temporary_files, wait_until_gone

# How the names begin under which an engine's workers meet in shared memory.
ENGINE_NAMES = ("psm_", "sem.mp-", "vllm_dist_")
_SHARED_MEMORY = Path("/dev/shm")


def abandoned_names(before: set[str]) -> set[str]:
    """Names in /dev/shm that are new and that no process maps: those of a run that goes on are in use."""
    new = {path for path in _SHARED_MEMORY.iterdir() if path.name not in before}
    mapped = _mapped_inodes() if new else set()
    return {path.name for path in new if (inode := _inode(path)) and inode not in mapped}


def shared_names() -> set[str]:
    return {path.name for path in _SHARED_MEMORY.iterdir()}


def processes(mark: str) -> Iterator[psutil.Process]:
    """Live processes that descend from the run with this mark."""
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                yield process
        except psutil.Error:
            continue


def workers_of(engine: int) -> list[psutil.Process]:
    """The own worker processes of the engine with this process id, by rank.

    They are known as its children: the titles that vLLM gives them do not always show.
    """
    below = psutil.Process(engine).children()
    return [one for one in below if "resource_tracker" not in " ".join(one.cmdline())]


def names_of(mark: str) -> set[str]:
    """Names in /dev/shm of what the run's processes map."""
    mapped = {inode for process in processes(mark) for inode in _mapped_by(process.pid)}
    return {path.name for path in _SHARED_MEMORY.iterdir() if _inode(path) in mapped}


def listening(mark: str | None = None) -> set[tuple[int | None, int]]:
    """(process, TCP port) of those that listen: of the run, or of all."""
    own = None if mark is None else {process.pid for process in processes(mark)}
    return {
        (one.pid, one.laddr.port)
        for one in psutil.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and (own is None or one.pid in own)
    }


def check_nothing_is_left(mark: str, listeners: set[tuple[int | None, int]], names: set[str]) -> None:
    """Check that no process, port, temporary file and name in shared memory of a run is left soon after its
    end: ``listeners`` are where it listened, ``names`` were there before it."""
    assert wait_until_gone(mark) == []
    assert listeners and not listeners & listening()
    assert soon(lambda: temporary_files(mark) == []), temporary_files(mark)
    assert soon(lambda: not abandoned_names(names)), abandoned_names(names)


def soon(is_so: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    """Whether it becomes so before the deadline."""
    deadline = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None


def _mapped_inodes() -> set[int]:
    return {inode for pid in psutil.pids() for inode in _mapped_by(pid)}


def _mapped_by(pid: int) -> set[int]:
    """Inodes of the file system of /dev/shm."""
    device = os.stat(_SHARED_MEMORY).st_dev
    wanted = f"{os.major(device):02x}:{os.minor(device):02x}"
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="replace").splitlines()
    except OSError:
        return set()
    return {int(fields[4]) for line in lines if (fields := line.split(maxsplit=5))[3] == wanted}
