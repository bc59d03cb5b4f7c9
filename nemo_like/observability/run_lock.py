"""A lock that lets only one run at a time use a directory, even a directory that several machines share.

DIRECTORY/starts/
  1.json      ended
  2.json      its process was killed
  3.json      holds the directory: the highest number does

Each start of a run takes the directory by making the file with the next number. When several starts try, the
file system gives the number to one of them. Numbers are never used again, so a start can only take the
directory from the very start that it has found to be over.

A start is over when its file says so, when its process is gone (which only its own machine can tell), when
Slurm has queued its job again, or when it gave no sign of life for ``LEASE_S``. The sign of life is the
modification time of its file, which the file server's clock sets; the same clock measures its age.
"""

from __future__ import annotations

import errno
import json
import os
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from socket import gethostname

LEASE_S = 60.0
_START = re.compile(r"([0-9]{1,9})\.json")

_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


class DirectoryInUse(RuntimeError):
    """Another start holds the directory. The message says which one, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """One start of a run: its process, its machine, and whether it has ended.

    Only processes with the same ``boot_id`` and ``pid_namespace`` can look up each other's ids, since each
    container on a machine numbers its own processes.
    """

    host: str
    boot_id: str  # the kernel's, which is new after every boot
    pid_namespace: str | None  # None where /proc shows the processes of another namespace
    pid: int
    process_began: int  # clock ticks after the boot; tells the process from a later one with the same id
    slurm_job: str | None  # cluster and number
    slurm_restarts: int  # how often Slurm had queued the job again
    began: str
    ended: str | None = None

    @classmethod
    def of_this_process(cls, environment: Mapping[str, str] = os.environ) -> RunStart:
        """Describe this process as a start of a run."""
        job = environment.get("SLURM_JOB_ID")
        return cls(
            host=gethostname(),
            boot_id=Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip(),
            pid_namespace=_pid_namespace(),
            pid=os.getpid(),
            process_began=_running_since(os.getpid()) or 0,
            slurm_job=f"{environment.get('SLURM_CLUSTER_NAME', '')}/{job}" if job else None,
            slurm_restarts=int(environment.get("SLURM_RESTART_COUNT", 0)),
            began=_now(),
        )

    def is_over(self, seen_by: RunStart, silence_s: float) -> bool:
        """Return whether this start is over for ``seen_by``, ``silence_s`` after its last sign of life."""
        if self.ended is not None:
            return True
        if self._shares_processes_with(seen_by):
            return not _is_running(self.pid, self.process_began)
        if self.slurm_job is not None and self.slurm_job == seen_by.slurm_job:
            is_requeued = seen_by.slurm_restarts > self.slurm_restarts
        else:
            is_requeued = False
        return is_requeued or silence_s >= LEASE_S

    @property
    def process(self) -> str:
        """The process of this start, in words."""
        job = f" (Slurm job {self.slurm_job.rpartition('/')[2]})" if self.slurm_job else ""
        return f"process {self.pid} on host {self.host}{job}"

    def describe(self, seen_by: RunStart, silence_s: float) -> str:
        """Return this start's process and last sign of life, for the user of the start ``seen_by``."""
        who = f"{self.process} has held it since {self.began}"
        if self._shares_processes_with(seen_by):
            return f"{who} and is running"
        return f"{who} and gave a sign of life {max(0.0, silence_s):.0f} s ago"

    def _shares_processes_with(self, other: RunStart) -> bool:
        own = (self.host, self.boot_id, self.pid_namespace)
        return self.pid_namespace is not None and own == (other.host, other.boot_id, other.pid_namespace)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatestStart:
    """The start that holds a directory, or held it last, as readers see it. Times are seconds since 1970."""

    process: str  # its process, in words
    began_s: float
    last_sign_s: float  # the last sign of life, or its end if its file says so
    is_over: bool
    has_ended: bool  # its file says that it is over; otherwise its process is gone, or silent for ``LEASE_S``


def latest_start(directory: Path) -> LatestStart | None:
    """Return the latest start of a directory; None when it had none, or when its file cannot be understood.

    This machine's clock measures the age of a sign of life from another machine; it must not be off by much
    of ``LEASE_S``.
    """
    number = _latest_number(directory / "starts")
    return _as_seen(directory / "starts" / f"{number}.json") if number else None


def all_starts(directory: Path) -> list[LatestStart]:
    """Return the starts of a directory whose files can be understood, the earliest first."""
    latest = _latest_number(directory / "starts")
    paths = [directory / "starts" / f"{number}.json" for number in range(1, latest + 1)]
    return [seen for path in paths if path.is_file() and (seen := _as_seen(path)) is not None]


def _as_seen(path: Path) -> LatestStart | None:
    start, last_sign_s = _read(path), path.stat().st_mtime
    if start is None:
        return None
    return LatestStart(
        process=start.process,
        began_s=_seconds(start.began),
        last_sign_s=last_sign_s if start.ended is None else _seconds(start.ended),
        is_over=start.is_over(RunStart.of_this_process(), time.time() - last_sign_s),
        has_ended=start.ended is not None,
    )


class DirectoryLock:
    """A directory that this process holds until ``release``, or until another start has taken it."""

    def __init__(self, directory: Path) -> None:
        """Take the directory.

        Raises DirectoryInUse when another start holds it, and OSError when it cannot be written.
        """
        self.directory = directory
        self._starts = directory / "starts"
        self._starts.mkdir(parents=True, exist_ok=True)
        self._start = RunStart.of_this_process()
        self._number = self._take()

    def renew(self) -> str | None:
        """Give a sign of life and return None, or return why this process has lost the directory.

        Raises OSError when the file system does not answer.
        """
        taken_by = self._path(self._number + 1)
        if taken_by.exists():
            other = _read(taken_by)
            who = f"process {other.pid} on host {other.host}" if other else "another start"
            return (
                f"{who} has taken {self.directory}, after no sign of life from this one for {LEASE_S:.0f} s"
            )
        try:
            os.utime(self._path(self._number))
        except FileNotFoundError:
            return f"{self._path(self._number)} is gone, with which this run held {self.directory}"
        return None

    def release(self) -> None:
        """Write into this start's file that the start is over."""
        ended = replace(self._start, ended=_now())
        unfinished = self._starts / f".{uuid.uuid4().hex}"
        try:
            _write(unfinished, ended)
            unfinished.replace(self._path(self._number))
        except OSError:
            unfinished.unlink(missing_ok=True)  # other starts will see that the process is gone

    def _take(self) -> int:
        candidate = self._starts / f".{uuid.uuid4().hex}"
        try:
            _write(candidate, self._start)
            number = _latest_number(self._starts)
            while True:
                if number:
                    self._check_over(self._path(number), candidate)
                number += 1
                if _create(self._path(number), candidate, self._start):
                    return number
        finally:
            candidate.unlink(missing_ok=True)

    def _check_over(self, path: Path, candidate: Path) -> None:
        """Raise DirectoryInUse unless the start in ``path`` is over."""
        os.utime(candidate)
        with path.open(encoding="utf-8") as file:  # opening it makes NFS ask the server
            silence_s = candidate.stat().st_mtime - os.fstat(file.fileno()).st_mtime
        holder = _read(path)
        if holder is None:
            is_over, who = silence_s >= LEASE_S, f"it cannot be read in {path} by whom"
        else:
            is_over = holder.is_over(self._start, silence_s)
            who = holder.describe(self._start, silence_s)
        if not is_over:
            raise DirectoryInUse(
                f"{self.directory} is in use: {who}. Wait for its end or stop it, or give this run another "
                "logger.run_name (and checkpointing.checkpoint_dir, where that is set). If its machine died, "
                f"the directory is free {LEASE_S:.0f} s after its last sign of life"
            )

    def _path(self, number: int) -> Path:
        return self._starts / f"{number}.json"


def _latest_number(starts: Path) -> int:
    """Return the number of the latest start; 0 when there is none. Files with other names are ignored."""
    found = (_START.fullmatch(path.name) for path in starts.iterdir()) if starts.is_dir() else ()
    return max((int(match[1]) for match in found if match), default=0)


def _create(path: Path, candidate: Path, start: RunStart) -> bool:
    """Also give the file ``candidate`` the name ``path``; return False when another file has that name."""
    try:
        os.link(candidate, path)
    except FileExistsError:
        # NFS may repeat a request whose answer was lost: then the first made the link that is in the way.
        return candidate.stat().st_nlink == 2
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        try:
            with path.open("x", encoding="utf-8") as file:
                json.dump(asdict(start), file)
        except FileExistsError:
            return False
    return True


def _write(path: Path, start: RunStart) -> None:
    path.write_text(json.dumps(asdict(start), indent=1) + "\n", encoding="utf-8")


def _read(path: Path) -> RunStart | None:
    """Return the start that a file describes, or None when the file cannot be understood."""
    try:
        start = RunStart(**json.loads(path.read_text(encoding="utf-8")))
        for moment in (start.began, start.ended):
            if moment is not None:
                _seconds(moment)
    except (ValueError, TypeError, RecursionError):
        return None
    numbers = (start.pid, start.process_began, start.slurm_restarts)
    texts = (start.host, start.boot_id, start.pid_namespace or "", start.slurm_job or "")
    is_start = all(type(one) is int for one in numbers) and all(isinstance(one, str) for one in texts)
    return start if is_start else None


def _pid_namespace() -> str | None:
    is_own = os.readlink("/proc/self") == str(os.getpid())
    return os.readlink("/proc/self/ns/pid") if is_own else None


def _is_running(pid: int, began: int) -> bool:
    """Return whether the process with this id that began at ``began`` is still running."""
    since = _running_since(pid)
    if since is not None:
        return since == began
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it belongs to another user; /proc may hide such processes
        return not Path(f"/proc/{pid}").exists()
    return False  # ended, and not yet waited for by its parent


def _running_since(pid: int) -> int | None:
    """Return when a process began, in clock ticks after the boot; None if it has ended or is hidden."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = text.rpartition(")")[2].split()  # before the last ")" is the program's name
    return None if state in "ZX" else int(fields[18])


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def _seconds(moment: str) -> float:
    return datetime.fromisoformat(moment).timestamp()
