"""Prepares processes that run untrusted Python: in a sandbox, or with limits alone.

The sandbox is bubblewrap's. A process in it has mount, process, network, IPC and host-name namespaces of
its own; sees read-only what Python needs and three small file systems in memory, none of the host's other
files; has no capability and cannot gain one; is another user than root; and has a filter on its system
calls (``syscalls.py``). It ends with whoever started it.

When root starts the process, no user namespace is needed, and the process changes to an unused user id, so
that its own processes are counted apart. When an ordinary user starts it, it gets a user namespace, in which
the same holds.
"""

from __future__ import annotations

import math
import os
import secrets
import shutil
import site
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from pathlib import Path
from random import SystemRandom

from nemo_like.environments.bubblewrap import bubblewrap_failure
from nemo_like.environments.cpu_account import ControlGroup, control_group
from nemo_like.environments.sandboxed.confine import KEEP_USER
from nemo_like.environments.syscalls import filter_program
from nemo_like.observability.exits import how_it_ended

FOLDER_MIB = 64
SHARED_MEMORY_MIB = 16
_TEMPORARY = "/tmp"  # the sandbox's own; readable paths may lie below it
_MAX_OPEN_FILES = 128
# For the process that runs tests: a child for each program tested at the same time, and the tests' processes.
_MAX_HARNESS_PROCESSES = 64
# systemd's conventions leave these ids unused.
_USER_IDS = range(60706, 61184)
_SYSTEM_FOLDERS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32")
_SYSTEM_FILES = ("/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")
_SANDBOXED = Path(__file__).parent / "sandboxed"
_PACKAGE = "nemo_like/environments/sandboxed"
_PROBE = "import threading\nthread = threading.Thread(target=print)\nthread.start()\nthread.join()"
_PROBE_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class ProgramLimits:
    """The limits of a program's time, memory and processes."""

    timeout_s: float  # by the clock, and of CPU time by all of its processes; see ``time_limit``
    memory_mib: int  # address space of one process
    max_processes: int  # and threads; only a sandbox counts them


@dataclass(frozen=True, slots=True)
class SandboxStart:
    """The arguments with which ``subprocess`` starts the process."""

    command: Sequence[str]
    pass_fds: Sequence[int]
    cwd: str
    env: dict[str, str]
    group: ControlGroup | None  # counts the CPU time of the process and all below it


@dataclass(frozen=True, slots=True)
class EndpointSocket:
    """How a command in a sandbox reaches the single server that it may reach."""

    socket: str  # the host's path of a Unix socket that leads to the server
    port: int  # of 127.0.0.1 in the sandbox, under which the command finds it


@dataclass(frozen=True, slots=True)
class Sandbox:
    """Prepares starts of processes: ``with sandbox.program(...) as start``.

    The caller starts the process in the block, and must not let it outlive the block.
    """

    limits: ProgramLimits
    readable_paths: tuple[str, ...] = ()
    is_real: bool = True  # False: limits alone, for programs that are trusted

    @contextmanager
    def program(self, mode: str, source: str) -> Iterator[SandboxStart]:
        """Prepare the start of ``sandboxed/program.py`` in this mode with this source."""
        own = {"CPU": math.ceil(self.limits.timeout_s), "NPROC": self.limits.max_processes}
        with data_file(source) as descriptor:
            arguments = ["program", mode, str(descriptor)]
            with self._start(arguments, own) as start:
                yield replace(start, pass_fds=[*start.pass_fds, descriptor])

    @contextmanager
    def harness(self) -> Iterator[SandboxStart]:
        """Prepare the start of ``sandboxed/harness.py``."""
        with self._start(["harness"], {"NPROC": _MAX_HARNESS_PROCESSES}) as start:
            yield start

    @contextmanager
    def command(self, command: Sequence[str], endpoint: EndpointSocket | None) -> Iterator[SandboxStart]:
        """Prepare the start of a command by ``sandboxed/agent_main.py``, in its own folder; in a real sandbox
        the command can reach ``endpoint``."""
        own = {"CPU": math.ceil(self.limits.timeout_s), "NPROC": self.limits.max_processes}
        port, path = (str(endpoint.port), _absent("endpoint")) if endpoint is not None else ("0", "")
        arguments = ["agent_main", port, path, str(len(command))]
        with self._start(arguments, own, command, endpoint) as start:
            yield start

    @contextmanager
    def _start(
        self,
        arguments: Sequence[str],
        own_limits: dict[str, int],
        words: Sequence[str] = (),
        endpoint: EndpointSocket | None = None,
    ) -> Iterator[SandboxStart]:
        with (
            control_group() as group,
            self._confined(arguments, own_limits, words, endpoint) as start,
        ):
            command = start.command if group is None else group.entered(start.command)
            yield replace(start, command=command, group=group)

    @contextmanager
    def _confined(
        self,
        arguments: Sequence[str],
        own_limits: dict[str, int],
        words: Sequence[str],
        endpoint: EndpointSocket | None,
    ) -> Iterator[SandboxStart]:
        common = {"CORE": 0, "FSIZE": FOLDER_MIB * 2**20, "NOFILE": _MAX_OPEN_FILES}
        limits = {"AS": self.limits.memory_mib * 2**20, **common, **own_limits}
        if self.is_real:
            user = SystemRandom().choice(_USER_IDS) if os.geteuid() == 0 else KEEP_USER
            python = _python(_absent("runner"), arguments, user, limits, words)
            with data_file(filter_program()) as filter_fd:
                command = [
                    *_bubblewrap(self.readable_paths, endpoint),
                    "--seccomp",
                    str(filter_fd),
                    "--",
                    *python,
                ]
                yield SandboxStart(command, [filter_fd], "/", _environment(_absent("program")), None)
            return
        # Without a namespace, all other processes of the user would count towards this limit.
        limits.pop("NPROC")
        folder = tempfile.mkdtemp(prefix="program-")
        try:
            root = str(Path(__file__).parents[2])
            command = ["setpriv", "--pdeathsig", "KILL", *_python(root, arguments, KEEP_USER, limits, words)]
            yield SandboxStart(command, [], folder, _environment(folder), None)
        finally:
            _remove(folder)


def check_sandbox(sandbox: Sandbox) -> None:
    """Raise RuntimeError, with the remedy, when processes cannot be started under ``sandbox``."""
    if not sandbox.is_real:
        if shutil.which("setpriv") is None:
            raise RuntimeError("programs are started with setpriv; install util-linux")
        return
    otherwise = "or set options.sandbox=none, with which programs can do whatever this user can"
    if failure := bubblewrap_failure():
        raise RuntimeError(f"options.sandbox=required {failure}, {otherwise}")
    if failure := _failure(sandbox):
        raise RuntimeError(
            f"a program with a thread fails in the sandbox ({failure}); bubblewrap must be 0.8 or newer, "
            "options.memory_mib and options.max_processes must suffice, and what Python needs outside of "
            f"{sys.base_prefix} belongs into options.readable_paths, {otherwise}"
        )


@cache
def _failure(sandbox: Sandbox) -> str:
    """Run a program that starts a thread in the sandbox; return why it fails, or an empty text."""
    try:
        with sandbox.program("stdin", _PROBE) as start:
            done = subprocess.run(
                start.command,
                pass_fds=start.pass_fds,
                cwd=start.cwd,
                env=start.env,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=_PROBE_TIMEOUT_S,
                check=False,
            )
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        return str(error)
    last_words = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    return last_words or how_it_ended(done.returncode) if done.returncode else ""


@contextmanager
def data_file(text: str | bytes) -> Iterator[int]:
    """Yield a descriptor from which ``text`` can be read; close it after the block."""
    content = text if isinstance(text, bytes) else text.encode(errors="replace")
    descriptor = os.memfd_create("data")
    try:
        with os.fdopen(os.dup(descriptor), "wb") as file:
            file.write(content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)


def _environment(folder: str) -> dict[str, str]:
    return {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": folder, "OMP_NUM_THREADS": "1"}


def _python(
    root: str, arguments: Sequence[str], user: int, limits: dict[str, int], words: Sequence[str]
) -> list[str]:
    """Return the command that runs ``main`` of a module in ``sandboxed``; ``arguments`` begin with its
    name, and ``words`` come after the limits."""
    module, *own = arguments
    start = (
        f"import sys; sys.path.append(sys.argv[1]); from {_PACKAGE.replace('/', '.')}.{module} import main; "
    )
    taken = ",".join(f"{name}={value}" for name, value in limits.items())
    return [
        *(os.path.realpath(sys.executable), "-I", "-S", "-B", "-c", f"{start}main(*sys.argv[2:])"),
        *(root, *own, str(user), taken, *words, *_package_folders()),
    ]


@cache
def _package_folders() -> tuple[str, ...]:
    """Return the folders in which packages are installed."""
    paths = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *site.getsitepackages())
    return tuple(dict.fromkeys(os.path.realpath(path) for path in paths if os.path.isdir(path)))


def _bubblewrap(readable_paths: Sequence[str], endpoint: EndpointSocket | None) -> list[str]:
    if os.geteuid() == 0:
        user = ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        user = ["--unshare-user", "--uid", "65534", "--gid", "65534"]
    folder, in_memory = _absent("program"), ("--perms", "1777", "--size", str(FOLDER_MIB * 2**20))
    return [
        *(str(shutil.which("bwrap")), "--die-with-parent", "--new-session", *user),
        *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--hostname", "program"),
        *(*in_memory, "--tmpfs", _TEMPORARY),
        *_readable(readable_paths),
        *(*in_memory, "--tmpfs", folder),
        *(("--ro-bind", endpoint.socket, _absent("endpoint")) if endpoint is not None else ()),
        *("--proc", "/proc", "--dev", "/dev"),
        *("--perms", "1777", "--size", str(SHARED_MEMORY_MIB * 2**20), "--tmpfs", "/dev/shm"),
        *("--remount-ro", "/dev", "--remount-ro", "/", "--chdir", folder),
    ]


@cache
def _absent(name: str) -> str:
    """Return a path, for use inside a sandbox, that does not exist on this machine: files of the machine keep
    their paths in a sandbox, so the path is free there."""
    paths = (f"/{name}{'-' * bool(number)}{number or ''}" for number in count())
    return next(path for path in paths if not os.path.lexists(path))


def _readable(readable_paths: Sequence[str]) -> Iterator[str]:
    """Yield bubblewrap's arguments that show the system's programs, Python and ``readable_paths``."""
    for folder in _SYSTEM_FOLDERS:
        if os.path.islink(folder):
            yield from ("--symlink", os.readlink(folder), folder)
        else:
            yield from ("--ro-bind-try", folder, folder)
    for file in _SYSTEM_FILES:
        yield from ("--ro-bind-try", file, file)
    shown = (os.path.realpath(sys.base_prefix), *_package_folders(), *readable_paths)
    pairs = {path: path for path in shown} | {str(_SANDBOXED): f"{_absent('runner')}/{_PACKAGE}"}
    for there, here in pairs.items():
        # Made here, since bubblewrap would make the parent folders readable for its own user alone.
        for parent in reversed(Path(here).parents[:-1]):
            yield from ("--perms", "0755", "--dir", str(parent))
        yield from ("--ro-bind", there, here)


def _remove(folder: str) -> None:
    """Remove a folder, however deeply a program nested it; files that this user may not remove stay."""
    names = (f"{folder}/{secrets.token_hex()}" for _ in count())
    waiting = [folder]
    with suppress(OSError):
        while waiting:
            path = waiting.pop()
            for entry in list(os.scandir(path)):
                if entry.is_dir(follow_symlinks=False):
                    os.chmod(entry.path, 0o700)
                    # Move it up to the top, so that no path gets longer than the system permits.
                    os.rename(entry.path, higher := next(names))
                    waiting.append(higher)
                else:
                    os.unlink(entry.path)
            if path != folder:
                os.rmdir(path)
        os.rmdir(folder)
