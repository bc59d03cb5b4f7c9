"""Removes the names in /dev/shm under which one engine's processes meet, so that no name outlives the engine.

vLLM's workers find their message queues, semaphores and reduction buffers there by name: 700 MB for two
workers. A killed process removes no names. Python starts a resource tracker to remove them, but that is
killed with the engine, since Ray ends the whole process group of an actor.

    before vLLM starts    track_names     starts the tracker outside of the process group: it notices when all
                                          processes of the engine are gone, and removes the names Python gave
    when all have met     remove_names    removes the names of the memory that they map: memory without a
                                          name is gone with the last process that maps it

Private parts: ``resource_tracker._resource_tracker`` of Python 3.11, and how the names in /dev/shm of Python
and of vllm 0.32.0 begin. Neither removes the names of a killed process group. This module can go with a vLLM
that unlinks its shared memory once all workers have mapped it.
"""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

_DIRECTORY = Path("/dev/shm")
# Prefixes of the names of Python's shared memory and semaphores, and of vLLM's reduction buffers on CPU.
_PREFIXES = ("psm_", "sem.mp-", "vllm_dist_")

_TRACKER = (
    "import os, sys\n"
    "if os.fork(): os._exit(0)\n"  # not a child of the engine, which Ray would end as well
    "os.setsid()\n"
    "from multiprocessing.resource_tracker import main\n"
    "main(int(sys.argv[1]))"
)


def track_names(unset: str) -> None:
    """Start Python's resource tracker for this process and its children, outside of their process group and
    without the environment variable ``unset``.

    There it survives when Ray kills the process group. Does nothing when this process has a tracker already.
    """
    tracker: Any = resource_tracker._resource_tracker
    if tracker._fd is not None:
        return
    read_end, write_end = os.pipe()
    environment = {name: value for name, value in os.environ.items() if name != unset}
    # -W ignore: otherwise the tracker warns of everything that it removes.
    command = [sys.executable, "-W", "ignore", "-c", _TRACKER, str(read_end)]
    subprocess.run(command, pass_fds=[read_end], env=environment, check=True)
    os.close(read_end)
    # multiprocessing sets the same attribute in processes that it spawns, which share their parent's tracker.
    tracker._fd = write_end


def remove_names() -> None:
    """Remove the names of the shared memory that this process and its children map.

    Call this when all these processes have mapped their memory: afterwards none can find it by name.
    """
    pids = [os.getpid(), *(child.pid for child in multiprocessing.active_children() if child.pid)]
    mapped = {file for pid in pids for file in _mapped(pid)}
    for path in _DIRECTORY.iterdir():
        if not path.name.startswith(_PREFIXES):
            continue
        try:
            status = path.stat()
        except FileNotFoundError:  # another engine has removed its own
            continue
        if (status.st_dev, status.st_ino) in mapped:
            path.unlink(missing_ok=True)


def _mapped(pid: int) -> Iterator[tuple[int, int]]:
    """Yield device and inode of each file that the process maps, which it may have opened by another name."""
    for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        _, _, _, device, inode, *_ = line.split(maxsplit=5)
        major, minor = (int(number, 16) for number in device.split(":"))
        yield os.makedev(major, minor), int(inode)
