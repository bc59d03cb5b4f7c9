"""Stands in for Ray's dashboard agent on the node of a private Ray, which serves nobody there.

Ray's own agent takes two seconds of CPU time to start, and 90 MB of memory. A raylet runs this program with
the agent's arguments. It says that none of the agent's ports is in use, and lives as long as the raylet,
which ends when its agent does. Standard library only.

Private part: the files and arguments of the agent of ray 2.60.0. ``ray.init`` cannot leave the agent out.
This module can go with a Ray whose raylet needs no agent.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

_PORTS = ("dashboard_agent_listen_port", "metrics_agent_port", "metrics_export_port")
_NOT_IN_USE = "-1"
_LOOK_S = 1.0


def main(arguments: Sequence[str]) -> None:
    """Write the files of the ports, and wait for the end of the raylet that started this process."""
    given = dict(one.removeprefix("--").split("=", 1) for one in arguments if "=" in one)
    for name in _PORTS:
        file = Path(given["session-dir"], f"{name}_{given['node-id']}")
        aside = file.with_name(f"{file.name}.tmp")
        aside.write_text(_NOT_IN_USE)
        aside.replace(file)  # nobody reads half of it
    never = threading.Event()
    while os.getppid() == int(os.environ["RAY_RAYLET_PID"]):
        never.wait(_LOOK_S)


if __name__ == "__main__":
    main(sys.argv[1:])
