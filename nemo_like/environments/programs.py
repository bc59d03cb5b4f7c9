"""Runs programs that the policy wrote, for their output or for the verdict of tests on their functions."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager, closing, suppress
from dataclasses import dataclass

from nemo_like.environments.sandbox import Sandbox, data_file
from nemo_like.environments.sandboxed.harness import TestOutcome
from nemo_like.environments.time_limit import PATIENCE, TimeLimit, time_limit

MAX_OUTPUT_BYTES = 1_000_000
_CHUNK_BYTES = 65536


@dataclass(frozen=True, slots=True)
class ProgramResult:
    """How a program ended, and what it printed. ``exit_code`` is None when the time ran out."""

    exit_code: int | None
    stdout: str


@dataclass(frozen=True, slots=True)
class Verdict:
    """How the tests of a program ended."""

    outcome: TestOutcome
    reason: str = ""
    returned: str | None = None  # the type's name, if a function returned an object instead of plain data


async def run_program(source: str, stdin: str, sandbox: Sandbox) -> ProgramResult:
    """Run a program and return its output, of which at most about MAX_OUTPUT_BYTES are read.

    Raises Starved when other processes left it too little CPU time.
    """
    with data_file(stdin) as given, closing(_Pipe()) as printed:
        try:
            async with time_limit(sandbox.limits.timeout_s) as limit, asyncio.TaskGroup() as tasks:
                reading = tasks.create_task(_read(printed.take_reader()))
                channels = Channels(given, printed.writer)
                async with _running(sandbox, "stdin", source, channels, limit) as process:
                    printed.close_writer()
                    exit_code = await process.wait()
        except TimeoutError:
            return ProgramResult(None, "")
    return ProgramResult(exit_code, reading.result().decode(errors="replace"))


async def passes_beside(source: str, tests: str, sandbox: Sandbox) -> bool:
    """Run the program and then its tests in the same process; return whether the tests reached their end.

    A program can deceive tests with which it shares objects, but not by ending early: after the tests, the
    process must return a random word that came with them. Raises Starved like ``run_program``.
    """
    word = secrets.token_hex()
    with data_file(f"{word}\n{tests}") as given, closing(_Pipe()) as said:
        try:
            async with (
                time_limit(sandbox.limits.timeout_s) as limit,
                _running(sandbox, "shared", source, Channels(given, said.writer), limit),
            ):
                said.close_writer()
                return await _read(said.take_reader()) == word.encode()
        except TimeoutError:
            return False


class Harness:
    """The parent's side of the process that runs tests, which call programs in other processes.

    See ``sandboxed/harness.py``.
    """

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox
        self._resources = ExitStack()
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket

    async def judge(self, source: str, tests: str) -> Verdict:
        """Run tests that call the program's functions by value, and return their verdict.

        Raises RuntimeError when the process that runs tests ends before it has taken them, and Starved like
        ``run_program``.
        """
        timeout_s = self._sandbox.limits.timeout_s
        with ExitStack() as open_files:
            calls, replies, verdict = (open_files.enter_context(closing(_Pipe())) for _ in range(3))
            given = open_files.enter_context(data_file(tests))
            try:
                self._start_if_ended()
                async with (
                    time_limit(timeout_s) as limit,
                    _running(
                        self._sandbox,
                        "calls",
                        source,
                        Channels(calls.reader, replies.writer),
                        limit,
                        helper=self._process,
                    ),
                ):
                    descriptors = [given, calls.writer, replies.reader, verdict.writer]
                    request = f"{timeout_s} {PATIENCE * timeout_s}".encode()
                    socket.send_fds(self._requests, [request], descriptors)
                    for pipe in (calls, replies, verdict):
                        pipe.close_writer()
                    content = await _read(verdict.take_reader())
            except TimeoutError:
                return Verdict(TestOutcome.failed, "the time ran out")
        if not content:
            raise RuntimeError("the process that runs the tests has ended")
        if not content.strip():
            return Verdict(TestOutcome.failed, "the tests were ended before their end")
        said = json.loads(content)
        return Verdict(TestOutcome(said["outcome"]), said["reason"], said["returned"])

    def close(self) -> None:
        """End the process that runs tests; the next ``judge`` starts another."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        self._resources.close()

    def __del__(self) -> None:
        self.close()

    def _start_if_ended(self) -> None:
        """Start the process that runs tests if there is none or it has ended."""
        if self._process is not None and self._process.poll() is None:
            return
        self.close()
        start = self._resources.enter_context(self._sandbox.harness())
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._requests = self._resources.enter_context(ours)
        with theirs:
            self._process = subprocess.Popen(
                start.command,
                pass_fds=start.pass_fds,
                cwd=start.cwd,
                env=start.env,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                process_group=0,
            )


@dataclass(frozen=True, slots=True)
class Channels:
    """The descriptors of a program's standard input and output."""

    stdin: int
    stdout: int


class _Pipe:
    """A pipe whose ends are closed one by one, or together at the end."""

    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()

    def take_reader(self) -> int:
        """Return the reader, which the caller must close."""
        taken, self.reader = self.reader, -1
        return taken

    def close_writer(self) -> None:
        os.close(self.writer)
        self.writer = -1

    def close(self) -> None:
        for descriptor in (self.reader, self.writer):
            if descriptor != -1:
                os.close(descriptor)


async def _read(descriptor: int) -> bytes:
    """Read to the end, but about MAX_OUTPUT_BYTES at most; then close the pipe, so that no more can be
    written."""
    reader, content = asyncio.StreamReader(), bytearray()
    file = os.fdopen(descriptor, "rb", buffering=0)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), file
    )
    with closing(transport):
        while len(content) < MAX_OUTPUT_BYTES and (chunk := await reader.read(_CHUNK_BYTES)):
            content += chunk
    return bytes(content)


@asynccontextmanager
async def _running(
    sandbox: Sandbox,
    mode: str,
    source: str,
    channels: Channels,
    limit: TimeLimit,
    helper: subprocess.Popen[bytes] | None = None,
) -> AsyncIterator[asyncio.subprocess.Process]:
    """Run a program's process during the block, under ``limit``; kill the process and its process group at
    the end. The program may wait for the work of ``helper``."""
    with sandbox.program(mode, source) as start:
        process = await asyncio.create_subprocess_exec(
            *start.command,
            pass_fds=start.pass_fds,
            cwd=start.cwd,
            env=start.env,
            stdin=channels.stdin,
            stdout=channels.stdout,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        limit.watch(process.pid, start.group, *([] if helper is None else [helper.pid]))
        try:
            yield process
        finally:
            # Also when the process has ended by itself: processes that it started are in its process group.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
