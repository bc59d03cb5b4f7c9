"""The fork server: a process that imports once what most processes of a run need, and that forks them.

    raylet ──▶ absent_agent ──starts──▶ fork server   imports, then waits for requests
       └─────▶ worker_start ──asks────▶ fork server ──forks──▶ worker of Ray, with these imports

Most of a start is imports; a fork has them at once, and shares their memory. Only processes on CPUs are
forked, below a private Ray. A worker starts without the server where its environment differs from the
server's, and where the server is gone, so that its death costs time alone. It ends with the raylet.

What the server imports must start no thread, and draw no id of Ray: forks would go on with one generator, and
draw the same ids. Every actor class that is decorated with ``ray.remote`` draws one.
"""

from __future__ import annotations

import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from nemo_like.cluster.imports import lasting_imports
from nemo_like.compat.worker_start import MAY_BE_FORKED, SERVER

# A private Ray has one job. Ray's compiled part reads this variable when it is imported.
_JOB = {"RAY_JOB_ID": "01000000"}
_REQUEST_TIMEOUT_S = 10.0
# The server has to import this very package, wherever its working directory is.
_PROGRAM = (
    "import sys; sys.path.insert(0, sys.argv[1]); "
    "from nemo_like.cluster.fork_server import main; main(*sys.argv[2:])"
)


@dataclass(frozen=True, slots=True)
class Imports:
    """Modules that are imported together; ``without`` is as for ``lasting_imports``."""

    modules: Sequence[str]
    without: Collection[str] = ()


@dataclass(frozen=True, slots=True)
class ForkServer:
    """The fork server of a private Ray. Its forks are started with variables of ``environment`` alone."""

    imports: Sequence[Imports]
    environment: Mapping[str, str]

    def variables(self, directory: Path) -> dict[str, str]:
        """Return the environment variables by which Ray's processes start and find the server, whose socket
        is in ``directory``."""
        imports = json.dumps([asdict(one) for one in self.imports])
        described = {
            "socket": str(directory / "forks"),
            "command": [sys.executable, "-c", _PROGRAM, str(Path(__file__).parents[2]), imports],
            "environment": {**self.environment, **MAY_BE_FORKED, **_JOB},
        }
        return {SERVER: json.dumps(described)}


@dataclass(frozen=True, slots=True)
class _Fork:
    """The worker that a fork becomes, as ``worker_start`` describes it."""

    command: list[str]  # the path of Ray's default_worker.py, and its arguments
    environment: dict[str, str]
    directory: str
    descriptors: list[int]  # for standard input, output and error

    @classmethod
    def received(cls, connection: socket.socket) -> _Fork | None:
        """Return the request that arrives on ``connection``; None where its sender has died."""
        connection.settimeout(_REQUEST_TIMEOUT_S)
        descriptors: list[int] = []
        try:
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
            with connection.makefile("rb") as sent:
                return cls(**json.load(sent), descriptors=descriptors)
        except (OSError, ValueError):
            _close(descriptors)
            return None


def main(imports: str, listening: str) -> None:
    """Be the fork server, or, in a fork, the worker. ``listening`` is the descriptor of the open socket."""
    load(imports)
    if len(os.listdir("/proc/self/task")) > 1:
        return  # a fork would have one thread only, and perhaps locks that another thread held
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks that have ended leave nothing
    with socket.socket(fileno=int(listening)) as server:
        request = _forked(server)
    if request is not None:
        _be_worker(request)


def load(imports: str) -> None:
    """Import what ``imports`` describes: the JSON of a list of ``Imports``."""
    for block in json.loads(imports):
        with lasting_imports(block["without"]):
            for module in block["modules"]:
                importlib.import_module(module)


def _forked(server: socket.socket) -> _Fork | None:
    """Fork for each request, and return it in the fork; return None when the process that started the server
    has gone, and standard input ends."""
    while True:
        ready, _, _ = select.select([server, sys.stdin], [], [])
        if sys.stdin in ready:
            return None
        connection, _ = server.accept()
        with connection:
            request = _Fork.received(connection)
            if request is None:
                continue
            if os.fork() == 0:
                connection.sendall(b"\0")  # raises, and ends the fork, where nobody waits for it any longer
                return request
            _close(request.descriptors)


def _be_worker(request: _Fork) -> None:
    """Become the worker of Ray that ``request`` describes, until it ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for standard, descriptor in enumerate(request.descriptors):
        os.dup2(descriptor, standard)
    _close(request.descriptors)
    os.environ.clear()
    os.environ.update(request.environment)
    os.chdir(request.directory)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()  # forks must not draw the same numbers; Python's own generator sees to that
    program = request.command[0]
    sys.argv[:] = request.command
    sys.path[:2] = [os.path.dirname(program)]  # in the place of what _PROGRAM and "-c" have put there
    runpy.run_path(program, run_name="__main__")


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
