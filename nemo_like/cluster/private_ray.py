"""A Ray for this run alone, on this machine. It keeps its files in one directory and leaves nothing behind.

The directory lies among the temporary files. A driver that is killed leaves the directory behind, and
each of Ray's processes that was stopped, unless all this happens inside ``swept_directory``.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path

import psutil
import ray

from nemo_like.cluster.actor_errors import ClusterError
from nemo_like.cluster.fork_server import ForkServer
from nemo_like.cluster.gcs_watch import GcsWatch
from nemo_like.cluster.janitor import MARK, clean_up
from nemo_like.compat.lean_ray import callers_signals, deferred_signals, few_services, processes_with
from nemo_like.observability.caches import inductor_cache

# The longest path that Ray gives a socket below ``temporary_parent``; Linux allows 107 bytes for all of it.
_LONGEST_SOCKET = "/job-abcdefgh/rayabcdefgh/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store"
_MAX_PARENT_BYTES = 107 - len(_LONGEST_SOCKET)
_SHORT_PARENT = "/tmp"
# An attempt that fails sooner than this did not fail because the machine is busy.
_QUICK_S = 10.0
_MAX_QUICK_FAILURES = 3
# The agent's last line, where it could not be loaded: a new attempt would end alike.
_FAILED_IMPORT = re.compile(r"(?:\w*ImportError|ModuleNotFoundError): .*")


def temporary_parent() -> str:
    """Return RAY_TMPDIR, else the directory for temporary files, or /tmp where its path is too long.

    A path is too long when the sockets that Ray makes below it would exceed Linux's limit.
    """
    asked = tempfile.gettempdir()
    return os.environ.get("RAY_TMPDIR") or (_SHORT_PARENT if _is_too_long(asked) else asked)


def temporary_parent_note() -> str | None:
    """Return a sentence for the user where the path of the directory for temporary files is too long and
    ``temporary_parent`` is another one; None otherwise."""
    asked = tempfile.gettempdir()
    if os.environ.get("RAY_TMPDIR") or not _is_too_long(asked):
        return None
    return (
        f"TMPDIR={asked} has {len(os.fsencode(asked))} bytes, and a path of more than {_MAX_PARENT_BYTES} "
        f"has no room for Ray's sockets below it; the run's temporary files are in {_SHORT_PARENT} instead. "
        "Choose a shorter path"
    )


def _is_too_long(parent: str) -> bool:
    return len(os.fsencode(parent)) > _MAX_PARENT_BYTES


class PrivateRay:
    """A private Ray; between ``start`` and ``stop`` this process is its driver."""

    def __init__(
        self,
        *,
        num_cpus: int,
        num_gpus: int,
        last_words: Callable[[str], None],
        fork_server: ForkServer | None = None,
    ) -> None:
        """Give the Ray these logical resources once it starts, and its workers this fork server.

        ``last_words``: see ``GcsWatch``.
        """
        self._num_cpus, self._num_gpus, self._last_words = num_cpus, num_gpus, last_words
        self._fork_server = fork_server
        self._directory: Path | None = None
        self._watch: GcsWatch | None = None

    def failure(self) -> str | None:
        """Return why this Ray is no longer usable; None while it works, and before ``start``."""
        return None if self._watch is None else self._watch.failure()

    def start(self, timeout_s: float, warn: Callable[[str], None]) -> None:
        """Start Ray; try again until the deadline when an attempt fails, and tell ``warn`` each time.

        Ray itself gives up an attempt after half a minute, which may be too short on a busy machine. Raises
        ClusterError when the deadline has passed or several attempts failed quickly, and at once where Ray's
        agent could not be loaded.
        """
        started_s = time.monotonic()
        num_quick = 0
        while True:
            attempt_s = time.monotonic()
            try:
                self._start()
                self._watch = GcsWatch(_control_process(), self._last_words)
                return
            # Ray also raises plain ``Exception``.
            except Exception as error:
                of_agent = None if self._directory is None else failed_import(self._directory)
                self.stop()
                now_s = time.monotonic()
                num_quick += now_s - attempt_s < _QUICK_S
                reason = f"Ray did not start: {_first_line(error)}"
                if of_agent is not None:
                    raise ClusterError(
                        f"Ray did not start, since its agent could not be loaded: {of_agent}. Install the "
                        "versions of requirements/ (docs/reference/dependencies.md)"
                    ) from error
                if now_s - started_s >= timeout_s or num_quick == _MAX_QUICK_FAILURES:
                    raise ClusterError(
                        f"{reason}. It was tried for {now_s - started_s:.0f} s; the deadline is "
                        f"cluster.start_timeout_s={timeout_s:g}"
                    ) from error
                warn(f"{reason}; trying again")

    def keep_logs(self, path: Path) -> None:
        """Copy the logs of Ray's processes, and of actors without a log of their own, to ``path``.

        A failure to copy, for instance on a full disk, is ignored.
        """
        if self._directory is not None:
            for logs in self._directory.glob("session_*_*/logs"):
                with suppress(OSError):
                    shutil.copytree(logs, path, dirs_exist_ok=True)

    def stop(self) -> None:
        """End every process of this Ray, stopped ones too, and remove its files. Safe to call twice.

        A signal that arrives meanwhile is handled afterwards.
        """
        with deferred_signals():
            self._stop()

    def _stop(self) -> None:
        if self._watch is not None:
            self._watch.end_stopped()
        ray.shutdown()
        if self._watch is not None:
            self._watch.close()
            self._watch = None
        if self._directory is not None:
            clean_up(self._directory)
            self._directory = None

    def _start(self) -> None:
        self._directory = Path(tempfile.mkdtemp(prefix="ray"))
        token = _token(self._directory)
        forks = {} if self._fork_server is None else self._fork_server.variables(self._directory)
        variables = {**_variables(self._directory), **token, **forks}
        with callers_signals(), few_services(), processes_with(variables), _set(token):
            ray.init(
                address="local",
                num_cpus=self._num_cpus,
                num_gpus=self._num_gpus,
                _temp_dir=str(self._directory),
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        _protect_token()


def failed_import(directory: Path) -> str | None:
    """Return the import error that ended Ray's agent, from its log in ``directory``; None where there is
    none. Ray's own error leaves it out."""
    for log in directory.glob("session_*_*/logs/dashboard_agent.log"):
        lines = log.read_text(encoding="utf-8", errors="replace").rstrip().splitlines()
        if lines and (found := _FAILED_IMPORT.fullmatch(lines[-1].strip())):
            return found[0].rstrip(" .")
    return None


def _protect_token() -> None:
    """Let no other user read the token that Ray made for this user; Ray writes a file that all can read."""
    with suppress(OSError):  # there is none, or it is another user's
        _kept_token().chmod(0o600)


def _kept_token() -> Path:
    """Return where Ray keeps the user's token; a relative path where the user has no home."""
    return Path(os.path.expanduser("~"), ".ray", "auth_token")


@contextmanager
def _set(variables: Mapping[str, str]) -> Iterator[None]:
    """Set these environment variables in this process for the block; none of them may be set already."""
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            del os.environ[name]


def _token(directory: Path) -> dict[str, str]:
    """Return the variable that tells Ray where its token is, or {} where the user's home can hold the token.

    Where it cannot, and no variable names a token yet, one is made in ``directory`` for this user alone.
    """
    if not {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}.isdisjoint(os.environ):
        return {}
    kept = _kept_token()
    if kept.is_absolute():
        with suppress(OSError):
            kept.parent.mkdir(parents=True, exist_ok=True)
            if os.access(kept if kept.exists() else kept.parent, os.R_OK | os.W_OK):
                return {}
    path = directory / "auth_token"
    path.touch(0o600)
    path.write_text(_own_token(), encoding="ascii")
    return {"RAY_AUTH_TOKEN_PATH": str(path)}


@cache
def _own_token() -> str:
    """Make the token of all Rays that this process starts; a process reads its token only once."""
    return secrets.token_hex(32)


def _variables(directory: Path) -> dict[str, str]:
    """Return the environment variables for every process of a Ray in this directory."""
    return {
        MARK: str(directory),
        "TMPDIR": str(directory),
        # A process that sets its title must not overwrite its environment: the mark is read from there.
        "SPT_NOENV": "1",
        # Start no workers that wait for tasks: a run has actors only, most with an environment of their own.
        "RAY_prestart_worker_first_driver": "0",
        **inductor_cache(),
    }


def _control_process() -> psutil.Process:
    return next(child for child in psutil.Process().children() if child.name() == "gcs_server")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(" .")
