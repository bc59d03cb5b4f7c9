"""The fork server without Ray: a small program has the place of Ray's default_worker.py."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from nemo_like.cluster.fork_server import ForkServer, Imports
from nemo_like.compat import absent_agent, worker_start

MAY_BE_FORKED = worker_start.MAY_BE_FORKED
WORKER = """
import json, os, sys
seen = {"parent": os.getppid(), "loaded": "colorsys" in sys.modules, "argv": sys.argv, "path": sys.path[0],
        "environment": dict(os.environ), "directory": os.getcwd()}
with open(sys.argv[1] + ".tmp", "w") as file:
    json.dump(seen, file)
os.rename(sys.argv[1] + ".tmp", sys.argv[1])
print("a worker")
"""


class Started:
    """A stand-in of the agent, which has the server as its child."""

    def __init__(self, folder: Path, server: ForkServer) -> None:
        self.folder = folder
        self.worker = folder / "default_worker.py"
        self.worker.write_text(WORKER)
        self.environment = {**os.environ, **server.variables(folder), "RAY_RAYLET_PID": str(os.getpid())}
        command = [sys.executable, str(absent_agent.__file__), f"--session-dir={folder}", "--node-id=n"]
        self.agent = subprocess.Popen(command, env=self.environment, stderr=subprocess.DEVNULL)
        wait_until((folder / "metrics_agent_port_n").exists)
        (self.process,) = psutil.Process(self.agent.pid).children()

    def start(self, variables: Mapping[str, str], job: str = "01000000", **options: str) -> dict:
        """Start a worker with these variables, as a raylet does, and return what it saw."""
        report = self.folder / f"{len(list(self.folder.iterdir()))}.json"
        context = json.dumps({"env_vars": dict(variables), **options})
        program = [sys.executable, str(worker_start.__file__), str(self.worker), str(report)]
        self.printed = subprocess.run(
            [*program, "--language=PYTHON", "--worker-id=7", f"--serialized-runtime-env-context={context}"],
            env={**self.environment, "RAY_JOB_ID": job},
            cwd=self.folder,
            stdout=subprocess.PIPE,
            timeout=60,
            check=True,
        ).stdout
        wait_until(report.exists)
        return json.loads(report.read_text())


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Started]:
    with_server = Started(tmp_path, ForkServer([Imports(["colorsys"])], {"COLOUR": "blue"}))
    yield with_server
    with_server.agent.kill()
    with_server.agent.wait()
    wait_until(lambda: not with_server.process.is_running())


def test_a_fork_has_the_servers_imports_and_is_otherwise_as_if_it_had_been_started(started: Started) -> None:
    seen = started.start({**MAY_BE_FORKED, "COLOUR": "blue"})
    assert seen["parent"] == started.process.pid and seen["loaded"]
    assert seen["argv"][2:] == ["--worker-id=7"] and seen["path"] == str(started.folder)
    assert seen["directory"] == str(started.folder) and started.printed == b"a worker\n"
    assert seen["environment"]["COLOUR"] == "blue" and seen["environment"]["RAY_JOB_ID"] == "01000000"
    plain = started.start({"COLOUR": "blue"})
    of_a_fork = seen["environment"].items() - plain["environment"].items()
    assert dict(of_a_fork) == MAY_BE_FORKED


@pytest.mark.parametrize(
    ("variables", "job"),
    [
        ({}, "01000000"),
        ({**MAY_BE_FORKED, "COLOUR": "red"}, "01000000"),
        ({**MAY_BE_FORKED, "SHAPE": "round"}, "01000000"),
        (MAY_BE_FORKED, "02000000"),
    ],
    ids=["it must not be forked", "another value", "another variable", "another job"],
)
def test_a_worker_starts_by_itself_where(started: Started, variables: Mapping[str, str], job: str) -> None:
    seen = started.start(variables, job)
    assert seen["parent"] != started.process.pid and not seen["loaded"]
    assert seen["argv"][2:] == ["--worker-id=7"]
    assert variables.items() <= seen["environment"].items()
    assert worker_start.SERVER not in seen["environment"]


def test_a_server_that_is_killed_costs_its_imports_alone(started: Started) -> None:
    started.process.kill()
    seen = started.start(MAY_BE_FORKED)
    assert seen["parent"] != started.process.pid and not seen["loaded"]


def test_a_request_that_ends_half_way_does_no_harm(started: Started) -> None:
    where = json.loads(started.environment[worker_start.SERVER])["socket"]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(where)
        connection.sendall(b"\0{")
    assert started.start(MAY_BE_FORKED)["loaded"]


def test_a_server_with_threads_forks_nothing(tmp_path: Path) -> None:
    (tmp_path / "with_a_thread.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, args=(30,), daemon=True).start()\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        started = Started(tmp_path, ForkServer([Imports(["colorsys", "with_a_thread"])], {}))
    try:
        assert not started.start(MAY_BE_FORKED)["loaded"]
    finally:
        started.agent.kill()
        started.agent.wait()


def test_variables_can_name_present_ones_and_the_interpreter_may_have_a_space(
    tmp_path: Path, started: Started
) -> None:
    (tmp_path / "a python").symlink_to(sys.executable)
    seen = started.start(
        {"COLOUR": "${COLOUR_BEFORE}:${RAY_JOB_ID}"}, py_executable=f"'{tmp_path / 'a python'}'"
    )
    assert seen["environment"]["COLOUR"] == ":01000000"
