"""Servers that have imported vLLM, torch, Ray and more once for all whole runs of the tests.

Most of the time of a small run are its imports.

    a test                ──descriptors, environment──▶ warm server ──forks──▶ the run's driver
    the run's fork server ──descriptors, environment──▶ warm server ──forks──▶ the run's fork server
    a check's process     ──descriptors, environment──▶ warm server ──forks──▶ the check's process

A run imports as it does for a user where it is the first with the same imports and environment variables, and
without the variables of ``sharing``. The second one starts a warm server, whose fork takes the place of its
process, in that run and in later ones. So it is for the driver of a run of ``run_grpo``, for each run's fork
server (``nemo_like.cluster.fork_server``), whose fork imports Ray and this project itself, and for each check
before a run (``nemo_like.preflight.child``). Warm servers end with the session of tests.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, ClassVar
from unittest import mock

from nemo_like.cluster import fork_server
from tests.functional.forked_process import ForkedProcess

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PATH = str(HERE / "warm")
# Names the folder with the sockets of warm servers. It is there as long as the session of tests.
FOLDER = "NEMO_LIKE_WARM_SERVERS"
CHECK = "nemo_like.preflight.child"
# By these variables, as the system shows them, the processes of a run are found.
SHOWN = ("NEMO_LIKE_TEST_RUN", "NEMO_LIKE_ENDS_WITH")
_ROOM, _ROOM_BYTES = "NEMO_LIKE_ROOM", 1024
# A raylet ends the process group of a worker that has ended, if it is not its own: here that of all forks.
_NO_GROUPS = {"RAY_process_group_cleanup_enabled": "0"}
MOST_SERVERS = 7  # for their memory
_LOOK_S = 2.0
# What variables begin with that imports may read. A fork has all of its run, and imports by its PYTHONPATH.
_READ = (
    *("GLIBC_", "GLOO_", "HF_", "HOME", "LD_PRELOAD", "MALLOC_", "MKL_", "NVPL_", "OMP_", "PATH"),
    *("TOKENIZERS_", "TORCH", "TRITON_", "VLLM_", "XDG_"),
)
# What this project's modules import of other packages in a run's processes, but for Ray. Megatron-core is
# imported without W&B there too (``nemo_like.policy.backend_kinds``).
_IMPORTED_BY_PROJECT = fork_server.Imports(
    [
        *("megatron.core.models.gpt", "megatron.core.optimizer", "megatron.core.distributed"),
        *("megatron.core.pipeline_parallel", "torch.distributed.checkpoint", "tensordict", "zmq.auth.thread"),
        *("fsspec", "jsonschema", "click", "google.protobuf"),
    ],
    without=["wandb"],
)
_READ_BY_DRIVERS = (*_READ, "HYDRA_", "MPL", "RAY_", "WANDB_")
# What ``run_grpo.py`` imports when it starts, when its checks are over, and when it draws at its end; Ray's
# and W&B's share when they start; and the configuration.
_IMPORTED_BY_DRIVERS = [
    *("run_grpo", "nemo_like.driver.whole_run", "nemo_like_tools.report.report_recorder"),
    *("matplotlib.backends.backend_agg", "matplotlib.figure"),
    *("ray.dashboard.optional_deps", "ray.dag", "pyarrow.json", "wandb", "tests.functional.loaded_demo"),
]
# What most of the time of a check is.
_IMPORTED_BY_CHECKS = ["nemo_like.preflight.data_scan", "nemo_like.data.tokenizer"]
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from tests.functional.warm_servers import main; main(*sys.argv[2:])"
)


@contextmanager
def warm() -> Iterator[None]:
    """Let runs that are started in the ``with`` block share warm servers."""
    with tempfile.TemporaryDirectory(prefix="warm-") as folder, mock.patch.dict(os.environ, {FOLDER: folder}):
        yield


@contextmanager
def cold() -> Iterator[None]:
    """Have runs that are started in the ``with`` block import for themselves, as they do for a user."""
    with mock.patch.dict(os.environ):
        os.environ.pop(FOLDER, None)
        yield


def sharing() -> dict[str, str]:
    """Return the environment variables of a run that may have the fork of a warm server."""
    if FOLDER not in os.environ:
        return {}
    places = [PATH, str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"PYTHONPATH": os.pathsep.join(places), **_NO_GROUPS}


@contextmanager
def shared() -> Iterator[None]:
    """Let what is started below this process in the ``with`` block have forks of warm servers."""
    with mock.patch.dict(os.environ, sharing()):
        yield


def hand_over(root: str, imports: str, listening: str) -> None:
    """In the process of a run's fork server: have the fork of a warm server in its place, and end with it.

    Returns where there is none to be had, so that this process is the fork server as always.
    """
    path = os.environ.get("PYTHONPATH", "")
    if path.split(os.pathsep)[0] != PATH or not _NO_GROUPS.items() <= os.environ.items():
        return
    with socket.socket(socket.AF_UNIX) as connection:
        if not _is_connected(connection, root, _third_party(imports), _read(os.environ, _READ)):
            return
        described = {"environment": dict(os.environ), "directory": os.getcwd()}
        wanted = {"imports": imports, "root": root, **described}
        _ask(connection, wanted, [0, 1, 2, int(listening)])
        for one in (0, int(listening)):
            os.close(one)
        connection.recv(1)  # returns when the fork has ended
    os._exit(0)


def hand_over_check() -> None:
    """In the process of a check: have the fork of a warm server in its place, and end as it does.

    Returns where there is none to be had. The fork ends with this process.
    """
    fork = forked_check(os.environ, [0, 1, 2])
    if fork is None:
        return
    if (code := fork.wait()) < 0:
        os.kill(os.getpid(), -code)
    os._exit(code)


def forked_check(
    environment: Mapping[str, str], descriptors: Sequence[int], *, at_once: bool = False
) -> ForkedProcess | None:
    """Have the fork of a warm server answer the call of a check. Returns None where there is none to be had.

    ``descriptors`` are for its standard input, output and error. With ``at_once`` it is no matter whether
    this is the first check.
    """
    wanted = {"check": True, "environment": {**environment}, "directory": os.getcwd()}
    read = _read(environment, _READ)
    return _forked(_IMPORTED_BY_CHECKS, read, wanted, descriptors, at_once=at_once)


def forked_script(
    command: Sequence[str], environment: Mapping[str, str], output: int, errors: int, stdout: IO[str] | None
) -> ForkedProcess | None:
    """Run a script of this project, with its arguments, in the fork of a warm server.

    ``output`` and ``errors`` are descriptors for its standard output and error; ``stdout`` reads the first,
    where it is a pipe. Returns None where there is no server to be had, and nothing has run. So it is for a
    module ("-m") of the tests, which may replace what others have then imported already.
    """
    if command[0] == "-m":
        return None
    wanted = {"command": [*command], "environment": {**environment}, "directory": str(ROOT)}
    read = _read(environment, _READ_BY_DRIVERS)
    return _forked(_IMPORTED_BY_DRIVERS, read, wanted, [0, output, errors], stdout)


def _forked(
    modules: Sequence[str],
    read: Mapping[str, str],
    wanted: Mapping[str, Any],
    descriptors: Sequence[int],
    stdout: IO[str] | None = None,
    *,
    at_once: bool = False,
) -> ForkedProcess | None:
    connection, imports = socket.socket(socket.AF_UNIX), json.dumps([asdict(fork_server.Imports(modules))])
    if not _is_connected(connection, str(ROOT), imports, read, at_once=at_once):
        connection.close()
        return None
    _ask(connection, wanted, descriptors)
    return ForkedProcess(connection, stdout)


def _read(environment: Mapping[str, str], beginnings: tuple[str, ...]) -> dict[str, str]:
    """Return the variables that imports may read."""
    return {name: one for name, one in environment.items() if name.startswith(beginnings)}


def _ask(connection: socket.socket, wanted: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    socket.send_fds(connection, [b"\0"], descriptors)
    connection.sendall(json.dumps(wanted).encode())
    connection.shutdown(socket.SHUT_WR)


def _third_party(imports: str) -> str:
    """Return the imports without modules of this project and of its user, but with what those of this project
    import of others. All of its modules import Ray, whose compiled part reads variables of a raylet when it
    is imported."""
    blocks = [
        {**block, "modules": [*filter(_is_third_party, block["modules"])]} for block in json.loads(imports)
    ]
    return json.dumps([*(block for block in blocks if block["modules"]), asdict(_IMPORTED_BY_PROJECT)])


def _is_third_party(module: str) -> bool:
    """Return whether a module is neither this project's nor its user's, nor imported by all."""
    if module in _IMPORTED_BY_PROJECT.modules:
        return False
    spec = importlib.util.find_spec(module.partition(".")[0])
    return spec is not None and any(
        place.startswith(sys.prefix) for place in spec.submodule_search_locations or [spec.origin or ""]
    )


def _is_connected(
    connection: socket.socket, root: str, imports: str, read: Mapping[str, str], *, at_once: bool = False
) -> bool:
    """Connect to the warm server with these imports and variables; start it where it is the second time that
    they are asked for, or ``at_once``."""
    if (name := os.environ.get(FOLDER)) is None:
        return False
    folder = Path(name)
    key = json.dumps([sys.executable, root, imports, sorted(read.items())])
    place = folder / hashlib.sha256(key.encode()).hexdigest()[:16]
    try:
        with open(folder / "lock", "w", encoding="utf-8") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not place.with_suffix(".seen").exists() and not at_once:
                place.with_suffix(".seen").write_text(key)
                return False
            if not place.exists():
                if len([*folder.glob("*.started")]) >= MOST_SERVERS:
                    return False
                place.with_suffix(".started").touch()
                _start(place, root, imports, read)
        connection.connect(str(place))
    except OSError:  # the session of tests has ended
        return False
    return True


def _start(place: Path, root: str, imports: str, read: Mapping[str, str]) -> None:
    environment = {**read, "PYTHONPATH": os.pathsep.join([PATH, root]), _ROOM: " " * _ROOM_BYTES}
    log = place.with_suffix(".log")
    with socket.socket(socket.AF_UNIX) as listening, log.open("w", encoding="utf-8") as errors:
        listening.bind(str(place))
        listening.listen()
        place_and_socket = [str(place), str(listening.fileno())]
        # Forked, so that it is nobody's child: tests count the children of processes.
        subprocess.run(
            ["setsid", "--fork", sys.executable, "-c", _PROGRAM, root, imports, *place_and_socket],
            env=environment,
            cwd=root,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=[listening.fileno()],
            check=True,
        )


class FolderOfEachFork(tempfile.TemporaryDirectory[str]):
    """A temporary folder that a module makes when it is imported, and that is deleted when the process ends:
    a fork needs one of its own, or the first fork to end deletes that of all."""

    made: ClassVar[list[tuple[FolderOfEachFork, tuple[Any, ...], dict[str, Any]]]] = []

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.made.append((self, args, named))

    @classmethod
    def make_anew(cls, directory: Path) -> None:
        """In a fork: give every such folder another path, in ``directory``.

        The run's own folder for temporary files is not yet there, and one that is killed leaves them.
        """
        for folder, args, named in cls.made:
            folder.cleanup()
            tempfile.TemporaryDirectory.__init__(folder, *args, **{**named, "dir": directory})


def main(imports: str, place: str, listening: str) -> None:
    """Be the warm server: fork for each request, until the folder of its socket has gone."""
    # What _PROGRAM and "-c" have put in front is not a fork's, nor what PYTHONPATH says.
    installed = [one for one in sys.path[2:] if one not in os.environ["PYTHONPATH"].split(os.pathsep)]
    with mock.patch.object(tempfile, "TemporaryDirectory", FolderOfEachFork):
        fork_server.load(imports)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with socket.socket(fileno=int(listening)) as requests:
        while os.path.exists(place):
            if not select.select([requests], [], [], _LOOK_S)[0]:
                continue
            connection, _ = requests.accept()
            with connection:
                if os.fork() == 0:
                    requests.close()
                    _answer(connection, installed, Path(place).parent)
                    return


def _answer(connection: socket.socket, installed: Sequence[str], folder: Path) -> None:
    """In a fork: go on in the place of the process that asked. ``folder`` goes with the session of tests."""
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 4)
    with connection.makefile("rb") as sent:
        wanted = json.load(sent)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    if "imports" not in wanted:
        _lead_a_session(connection, descriptors)
    for standard, one in enumerate(descriptors[:3]):
        os.dup2(one, standard)
        os.close(one)
    # The streams of before were told that they can be sought in.
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
    os.environ.clear()
    os.environ.update(wanted["environment"])
    os.chdir(wanted["directory"])
    tempfile.tempdir = None
    FolderOfEachFork.make_anew(folder)
    _show(wanted["environment"])
    sys.path[:] = [*filter(None, os.environ["PYTHONPATH"].split(os.pathsep)), *installed]
    importlib.invalidate_caches()
    if "imports" in wanted:
        sys.path[:0] = [wanted["root"], ""]  # which a fork server takes for what its command put there
        fork_server.main(wanted["imports"], str(descriptors[3]))
        return
    connection.close()
    # Python ignores an interrupt where its parent does.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if "command" in wanted:
        sys.argv[:] = wanted["command"]
        sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
        runpy.run_path(sys.argv[0], run_name="__main__")
    else:
        sys.path.insert(0, os.getcwd())
        importlib.import_module(CHECK).main()


def _lead_a_session(connection: socket.socket, descriptors: Sequence[int]) -> None:
    """Fork, and return in the fork, which leads a session. Write its process id to ``connection``, and its
    exit code when it has ended; end it when whoever asked is gone."""
    leads, is_leading = os.pipe()
    if (pid := os.fork()) == 0:
        os.setsid()
        os.close(is_leading)
        os.close(leads)
        return
    for one in (0, 1, 2, is_leading, *descriptors):
        os.close(one)
    os.read(leads, 1)
    ended, watched = os.pidfd_open(pid), select.poll()
    watched.register(ended, select.POLLIN)
    watched.register(connection, 0)  # of which a hang-up is always told
    with suppress(ConnectionError):
        connection.sendall(f"{pid}\n".encode())
    if ended not in dict(watched.poll()):
        os.killpg(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    with suppress(ConnectionError):
        connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
    os._exit(0)


def _show(environment: Mapping[str, str]) -> None:
    """Write the variables of the run to where the system looks for those that this process began with."""
    shown = "".join(f"{name}={environment[name]}\0" for name in SHOWN if name in environment)
    block = Path("/proc/self/environ").read_bytes()
    start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47])  # env_start
    place = block.index(f"{_ROOM}=".encode())
    room = block.index(b"\0", place) - place
    with open("/proc/self/mem", "r+b", buffering=0) as memory:
        memory.seek(start + place)
        memory.write(f"{shown}{_ROOM}=".ljust(room).encode())
