"""Stands in for the program by which a private Ray's raylet starts a worker's process.

Ray's own program imports Ray, which takes 0.4 seconds of CPU time, only to set environment variables and to
execute Python once more. This one does the same without Ray. Where the run has a fork server
(``cluster.fork_server``) and the worker's variables ask for it, the server forks the worker instead: the fork
has the server's imports, and this program ends. Standard library only.

Private part: the arguments of ``setup_worker.py`` of ray 2.60.0. ``ray.init`` cannot name another program.
This module can go with a Ray whose workers start without importing Ray twice.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# Describes the fork server to Ray's processes; see ``ForkServer.variables``.
SERVER = "NEMO_LIKE_FORK_SERVER"
# A process that is started with this variable may be a fork.
MAY_BE_FORKED = {"NEMO_LIKE_MAY_BE_FORKED": "1"}

# After this long a worker starts without the server. Where the server still imports after a minute, on a busy
# machine, Ray ends this process and starts it again.
_PATIENCE_S = 300.0


def main(arguments: Sequence[str]) -> None:
    """Start the worker that a raylet describes by ``arguments``: the path of Ray's ``default_worker.py``, its
    options, and the serialized runtime environment."""
    context: dict[str, Any] = {}
    command = []
    for one in arguments:
        name, _, value = one.partition("=")
        if name == "--serialized-runtime-env-context":
            context = json.loads(value)
        elif name != "--language":
            command.append(one)
    if context.get("command_prefix") or context.get("override_worker_entrypoint"):
        own = Path(command[0]).with_name("setup_worker.py")
        os.execv(sys.executable, [sys.executable, str(own), *arguments])
    variables = context.get("env_vars") or {}
    for name, value in variables.items():
        # As Ray does: "${NAME}" is the variable's present value, or nothing.
        os.environ[name] = re.sub(r"\$\{[A-Z0-9_]+\}", "", os.path.expandvars(value))
    if not _is_forked(command, variables):
        python = shlex.split(context.get("py_executable") or shlex.quote(sys.executable))
        os.execvp(python[0], [*python, *command])


def _is_forked(command: Sequence[str], variables: Mapping[str, str]) -> bool:
    """Have the fork server fork this worker, and return whether it did.

    It does not where there is none, or where a variable has another value than in the server, which has read
    some of them at its imports.
    """
    server = json.loads(os.environ.pop(SERVER, "{}"))
    there = server.get("environment", {})
    asked = {**variables, "RAY_JOB_ID": os.environ.get("RAY_JOB_ID")}
    asked.pop("PYTHONPATH", None)  # it is the driver's in every process
    if not (MAY_BE_FORKED.items() <= asked.items() <= there.items()):
        return False
    request = {"command": command, "environment": dict(os.environ), "directory": os.getcwd()}
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(_PATIENCE_S)
            connection.connect(server["socket"])
            socket.send_fds(connection, [b"\0"], [0, 1, 2])
            connection.sendall(json.dumps(request).encode())
            connection.shutdown(socket.SHUT_WR)
            return connection.recv(1) != b""
    except OSError:  # it has died, or imports for too long
        return False


if __name__ == "__main__":
    main(sys.argv[1:])
