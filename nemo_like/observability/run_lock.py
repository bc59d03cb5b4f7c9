"""One run at a time in a directory, also one that several machines share.

DIRECTORY/starts/
  1.json      ended
  2.json      its process was killed
  3.json      holds the directory: the highest number does

A start takes the directory by making the next number, which the file system gives to one of several that
try. Numbers are never used again, so nobody can take away what he has not looked at.

A start is over when it says so, when its process is gone (as only its own machine can tell), when Slurm has
queued its job again, or when it gave no sign of life for ``LEASE_S``. The sign is its file's time, which the
file server's clock sets; the age is measured with the same clock.
"""

from __future__ import annotations

import errno
import json
import os
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from socket import gethostname

LEASE_S = 60.0

_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)


class DirectoryInUse(RuntimeError):
    """Another start holds the directory; the message says which, and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStart:
    """Who started a run. Process ids mean something to processes of the same ``boot_id`` and
    ``pid_namespace`` alone: containers on one machine count their processes each for themselves."""

    host: str
    boot_id: str  # of the kernel; another after every boot
    pid_namespace: str | None  # null where /proc shows another one's processes
    pid: int
    process_began: int  # clock ticks after the boot: tells a process from a later one with its id
    slurm_job: str | None  # cluster and number
    slurm_restarts: int  # how often Slurm had queued the job again
    began: str
    ended: str | None = None

    @classmethod
    def of_this_process(cls, environment: Mapping[str, str] = os.environ) -> RunStart:
        """The start that this process is."""
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
        """Whether this start has ended, as the start ``seen_by`` sees it."""
        if self.ended is not None:
            return True
        if self._shares_processes_with(seen_by):
            return not _is_running(self.pid, self.process_began)
        if self.slurm_job is not None and self.slurm_job == seen_by.slurm_job:
            is_requeued = seen_by.slurm_restarts > self.slurm_restarts
        else:
            is_requeued = False
        return is_requeued or silence_s >= LEASE_S

    def describe(self, seen_by: RunStart, silence_s: float) -> str:
        """What a start that is not over does, for the user of the start ``seen_by``."""
        job = f" (Slurm job {self.slurm_job.rpartition('/')[2]})" if self.slurm_job else ""
        who = f"process {self.pid} on host {self.host}{job} has held it since {self.began}"
        if self._shares_processes_with(seen_by):
            return f"{who} and is running"
        return f"{who} and gave a sign of life {max(0.0, silence_s):.0f} s ago"

    def _shares_processes_with(self, other: RunStart) -> bool:
        own = (self.host, self.boot_id, self.pid_namespace)
        return self.pid_namespace is not None and own == (other.host, other.boot_id, other.pid_namespace)


class DirectoryLock:
    """A directory that this process holds until ``release``, or until another has taken it."""

    def __init__(self, directory: Path) -> None:
        """Raises DirectoryInUse when another start holds the directory, OSError when it cannot be written."""
        self.directory = directory
        self._starts = directory / "starts"
        self._starts.mkdir(parents=True, exist_ok=True)
        self._start = RunStart.of_this_process()
        self._number = self._take()

    def renew(self) -> str | None:
        """Give a sign of life. Returns why the directory is not this process's any more, None when it is.

        Raises OSError when neither can be told.
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
        """Say that this start is over."""
        ended = replace(self._start, ended=_now())
        unfinished = self._starts / f".{uuid.uuid4().hex}"
        try:
            _write(unfinished, ended)
            unfinished.replace(self._path(self._number))
        except OSError:
            unfinished.unlink(missing_ok=True)  # then the end of the process says it

    def _take(self) -> int:
        candidate = self._starts / f".{uuid.uuid4().hex}"
        try:
            _write(candidate, self._start)
            number = max((int(path.stem) for path in self._starts.glob("[0-9]*.json")), default=0)
            while True:
                if number:
                    self._check_over(self._path(number), candidate)
                number += 1
                if _create(self._path(number), candidate, self._start):
                    return number
        finally:
            candidate.unlink(missing_ok=True)

    def _check_over(self, path: Path, candidate: Path) -> None:
        """Raises DirectoryInUse unless the start in ``path`` is over."""
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


def _create(path: Path, candidate: Path, start: RunStart) -> bool:
    """Give ``candidate`` this name too; False when another file has it already."""
    try:
        os.link(candidate, path)
    except FileExistsError:
        # Over NFS the first of two tries may have succeeded, and its answer been lost.
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
    """None when the file says nothing that can be understood."""
    try:
        return RunStart(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        return None


def _pid_namespace() -> str | None:
    is_own = os.readlink("/proc/self") == str(os.getpid())
    return os.readlink("/proc/self/ns/pid") if is_own else None


def _is_running(pid: int, began: int) -> bool:
    """Whether the process with this id is the one that began then."""
    since = _running_since(pid)
    if since is not None:
        return since == began
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # /proc may hide what belongs to others
        return not Path(f"/proc/{pid}").exists()
    return False  # a corpse


def _running_since(pid: int) -> int | None:
    """Clock ticks after the boot at which this process began; None when there is none, or only its corpse."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    state, *fields = text.rpartition(")")[2].split()  # what precedes is the program's name
    return None if state in "ZX" else int(fields[18])


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
