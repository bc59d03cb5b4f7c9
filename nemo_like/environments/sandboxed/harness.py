"""The main function of the process that runs tests: it starts once, and forks a child for every program.

A socket on stdin brings a message per program, the time limit in seconds, with four descriptors:

    tests     the test program is read from it
    calls     calls to the program's process are written to it
    replies   the program's replies are read from it
    verdict   the child writes a line end to it as soon as it has the request, and after the tests' end
              ``{"outcome": ..., "reason": ..., "returned": ...}``

The process ends when the socket is closed, which also happens when the asking process ends.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sys
import tempfile
from enum import Enum
from types import ModuleType
from typing import Any

from nemo_like.environments.sandboxed.called_functions import functions_called
from nemo_like.environments.sandboxed.confine import confine
from nemo_like.environments.sandboxed.remote_program import (
    ProgramExit,
    RefusedTests,
    RemoteFunction,
    RemoteProgram,
)

_NUM_DESCRIPTORS = 4
_MAX_MESSAGE_BYTES = 64
_MAX_REASON = 500


class TestOutcome(Enum):
    """How the tests of a program ended."""

    passed = "passed"
    failed = "failed"
    refused = "refused"  # the tests cannot be run by value, whatever the program


def main(user_id: str, limits: str, *package_folders: str) -> None:
    """Confine this process, then fork for every request until the socket is closed."""
    confine(int(user_id), limits)
    sys.path += package_folders
    folders: dict[int, str] = {}
    with socket.socket(fileno=os.dup(0)) as requests:
        while True:
            message, descriptors, _, _ = socket.recv_fds(requests, _MAX_MESSAGE_BYTES, _NUM_DESCRIPTORS)
            if not message:
                return
            _clear_after_ended(folders)
            folder = tempfile.mkdtemp()
            child = os.fork()
            if child == 0:
                requests.close()
                os.chdir(folder)
                cpu_s, wall_s = map(float, message.split())
                _judge_and_exit(cpu_s, wall_s, *descriptors)
            folders[child] = folder
            for descriptor in descriptors:
                os.close(descriptor)


def _clear_after_ended(folders: dict[int, str]) -> None:
    """Reap the children that have ended, and remove their folders."""
    for child in list(folders):
        if os.waitpid(child, os.WNOHANG)[0]:
            shutil.rmtree(folders.pop(child), ignore_errors=True)


def _judge_and_exit(cpu_s: float, wall_s: float, tests: int, calls: int, replies: int, verdict: int) -> None:
    # The default action of both ends the process, also inside a single endless operation.
    signal.setitimer(signal.ITIMER_PROF, cpu_s)
    signal.setitimer(signal.ITIMER_REAL, wall_s)
    os.write(verdict, b"\n")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nowhere, descriptor)
    try:
        with os.fdopen(tests, encoding="utf-8") as file:
            source = file.read()
        program = RemoteProgram(os.fdopen(calls, "wb"), os.fdopen(replies, "rb"))
        outcome, reason = judge(source, program)
        content = {"outcome": outcome.value, "reason": reason[:_MAX_REASON], "returned": program.returned}
        os.write(verdict, json.dumps(content).encode())
    finally:
        os._exit(0)


def judge(tests: str, program: RemoteProgram) -> tuple[TestOutcome, str]:
    """Run the tests to their end; return their outcome, and the reason if they did not pass."""
    try:
        names = functions_called(tests)
    except RefusedTests as refused:
        return TestOutcome.refused, str(refused)
    failure = _run(tests, {name: RemoteFunction(program, name) for name in names})
    if program.refusal is not None:
        return TestOutcome.refused, program.refusal
    failure = program.failure or failure
    if failure is not None:
        return TestOutcome.failed, failure
    if program.num_calls == 0:
        return TestOutcome.refused, "they ended without calling a function of the program"
    return TestOutcome.passed, ""


def _run(tests: str, functions: dict[str, RemoteFunction]) -> str | None:
    """Return why the tests did not end well; None when they did."""
    module = ModuleType("__main__")
    namespace: dict[str, Any] = module.__dict__
    namespace.update(functions, __file__="tests.py")
    sys.modules["__main__"] = module
    sys.argv = ["tests.py"]
    try:
        exec(compile(tests, "tests.py", "exec", dont_inherit=True), namespace)
    except ProgramExit:
        return "a function called sys.exit"
    except SystemExit as end:
        # unittest.main() raises this at its end, with False or 0 for success.
        return None if not end.code else f"the tests ended with {end.code}"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return None
