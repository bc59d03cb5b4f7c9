"""Starts the process in which a hub's package runs, and calls it; ``hubs/hub_main.py`` is that process."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import sysconfig
import threading
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from nemo_like.environments.interface import Failure, FailureKind
from nemo_like.environments.shared_options import HubOptions

_MAIN = Path(__file__).with_name("hubs") / "hub_main.py"
_LONGEST_LINE = 256 << 20  # bytes
_LIST_TIMEOUT_S = 600.0  # for all problems of a source


class HubRefused(RuntimeError):
    """The package could not be loaded, or refused its options; the message says why."""


class HubCallFailed(Exception):
    """A call failed; ``failure`` says how."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.reason)
        self.failure = failure


class HubDied(Exception):
    """The package's process has ended, and answers no call any more."""


def listed_problems(options: HubOptions, size: int, seed: int) -> list[dict[str, Any]]:
    """Return the problems that a hub makes: prompt, answer and data each; start and end a process for that.

    Raises ValueError when the package cannot make them.
    """
    arguments = {"size": size, "seed": seed}
    call = {"id": 0, "method": "problems", "arguments": arguments}
    lines = "".join(json.dumps(line) + "\n" for line in (_start(options), call))
    try:
        ended = subprocess.run(
            _command(options),
            check=False,
            input=lines.encode(),
            env=_environment(),
            capture_output=True,
            timeout=_LIST_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ValueError(f"its problems could not be made: {error}") from error
    answers = [json.loads(line) for line in ended.stdout.splitlines()]
    if answers and (reason := answers[0].get("refused")):
        raise ValueError(reason)
    if len(answers) < 2:
        last = ended.stderr.decode(errors="replace").strip().splitlines()[-3:]
        raise ValueError(f"its process ended with code {ended.returncode}: {' / '.join(last)}")
    if failed := answers[1].get("failed"):
        raise ValueError(failed["reason"])
    return answers[1]["result"]


class HubProcess:
    """A hub's process, and the calls that wait for its answers; they are found by their ids.

    It ends when this object's side of its standard input does.
    """

    def __init__(self, options: HubOptions) -> None:
        """Start the process and wait until the package has taken its options. Raises HubRefused."""
        try:
            self._process = subprocess.Popen(
                _command(options),
                env=_environment(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                bufsize=0,
            )
        except OSError as error:
            raise HubRefused(f"{options.python} could not be started: {error}") from error
        self._sending = threading.Lock()
        self._send(_start(options))
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise HubRefused(f"its process ended with code {self._process.wait()}")
        if reason := json.loads(line).get("refused"):
            raise HubRefused(reason)
        self._reading: asyncio.Task[None] | None = None
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._num_calls = 0

    async def call(self, method: str, **arguments: Any) -> Any:
        """Call a method of ``HubHost`` and return its result. Raises HubCallFailed and HubDied."""
        if self._reading is None:
            self._reading = asyncio.get_running_loop().create_task(self._read())
        if self._reading.done():
            raise HubDied
        self._num_calls += 1
        call_id = self._num_calls
        answered = self._calls[call_id] = asyncio.get_running_loop().create_future()
        try:
            # In a thread: the process may read no further before its answers have been read, here.
            await asyncio.to_thread(self._send, {"id": call_id, "method": method, "arguments": arguments})
            answer = await answered
        finally:
            self._calls.pop(call_id, None)
        if (failed := answer.get("failed")) is not None:
            raise HubCallFailed(Failure(FailureKind[failed["kind"]], failed["reason"]))
        return answer["result"]

    def _send(self, content: dict[str, Any]) -> None:
        line = memoryview(json.dumps(content).encode() + b"\n")
        assert self._process.stdin is not None
        with self._sending, suppress(BrokenPipeError):  # the end of its answers says that it ended
            while line:
                line = line[self._process.stdin.write(line) :]

    async def _read(self) -> None:
        """Give each call its answer until the process ends; then fail the calls that are left."""
        reader = asyncio.StreamReader(limit=_LONGEST_LINE)
        protocol = asyncio.StreamReaderProtocol(reader)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, self._process.stdout)
        with suppress(ValueError, RecursionError):
            while line := await reader.readline():
                answer = json.loads(line)
                if (answered := self._calls.get(answer["id"])) is not None and not answered.done():
                    answered.set_result(answer)
        for answered in self._calls.values():
            if not answered.done():
                answered.set_exception(HubDied())


def _start(options: HubOptions) -> dict[str, Any]:
    own = {name: value for name, value in asdict(options).items() if name != "python"}
    return {"adapter": options.adapter, "options": own}


def _command(options: HubOptions) -> list[str]:
    return [sys.executable if options.python is None else options.python, str(_MAIN)]


def _environment() -> dict[str, str]:
    """Return the environment variables, with the user's own places for modules, but not those of the packages
    of this interpreter, which another one must not see."""
    own = {sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib", "platstdlib")}
    places = [path or os.getcwd() for path in sys.path]
    kept = [path for path in places if os.path.isdir(path) and not any(_within(path, one) for one in own)]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(kept)}


def _within(path: str, directory: str) -> bool:
    return Path(path).resolve().is_relative_to(Path(directory).resolve())
