"""Stands in for Ray's dashboard agent on the node of a private Ray, which serves nobody there.

Ray's own agent takes two seconds of CPU time to start, and 90 MB of memory. A raylet runs this program with
the agent's arguments. It says that none of the agent's ports is in use, and lives as long as the raylet,
which ends when its agent does. It also starts the run's fork server (``cluster.fork_server``), where Ray's
compiled part can be imported only with the variables of a raylet. Standard library only.

Private part: the files and arguments of the agent of ray 2.60.0. ``ray.init`` cannot leave the agent out.
This module can go with a Ray whose raylet needs no agent.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

_PORTS = ("dashboard_agent_listen_port", "metrics_agent_port", "metrics_export_port")
_NOT_IN_USE = "-1"
_LOOK_S = 1.0


def main(arguments: Sequence[str]) -> None:
    """Write the files of the ports, and wait for the end of the raylet that started this process."""
    _start_fork_server()  # before the files, without which the raylet starts no workers
    given = dict(one.removeprefix("--").split("=", 1) for one in arguments if "=" in one)
    for name in _PORTS:
        file = Path(given["session-dir"], f"{name}_{given['node-id']}")
        aside = file.with_name(f"{file.name}.tmp")
        aside.write_text(_NOT_IN_USE)
        aside.replace(file)  # nobody reads half of it
    never = threading.Event()
    while os.getppid() == int(os.environ["RAY_RAYLET_PID"]):
        never.wait(_LOOK_S)


def _start_fork_server() -> None:
    """Start the run's fork server, if it has one. Requests can wait for it at once, and it ends when this
    process does."""
    described = json.loads(os.environ.get("NEMO_LIKE_FORK_SERVER", "{}"))
    if not described:
        return
    end_of_server, _ = os.pipe()  # this process holds the other end for as long as it lives
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(described["socket"])
        listening.listen()
        subprocess.Popen(
            [*described["command"], str(listening.fileno())],
            env=os.environ | described["environment"],
            stdin=end_of_server,
            pass_fds=[listening.fileno()],
        )


if __name__ == "__main__":
    main(sys.argv[1:])
