"""Runs agents that are commands: each in its own process, in a sandbox, with its own folder.

task as JSON ──▶ stdin │ command │ stdout ──▶ the last line: the reward as JSON, unless it was reported
                         │ OPENAI_BASE_URL
                         ▼
in a sandbox: 127.0.0.1 there ──▶ Unix socket ──▶ this process ──▶ the endpoint; no other network
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from nemo_like.cluster.proxies import no_proxy
from nemo_like.data.messages import as_record
from nemo_like.environments.cpu_account import ControlGroup
from nemo_like.environments.interface import AgentAccess, FailureKind, Turn
from nemo_like.environments.sandbox import EndpointSocket, ProgramLimits, Sandbox, check_sandbox
from nemo_like.environments.shared_options import AgentOptions, SandboxMode
from nemo_like.environments.time_limit import until_cpu_is_used_up
from nemo_like.observability.exits import how_it_ended

_CHUNK_BYTES = 65536
_SHOWN_CHARACTERS = 2000
_END_TIMEOUT_S = 5.0  # for the pipes of a command that was killed to close
# The port of the endpoint in a sandbox, whose network is its own.
_INNER_PORT = 8000


class Flooded(Exception):
    """A command printed more than it may."""


class CommandFailed(Exception):
    """A command ended without a reward."""

    def __init__(self, reason: str, kind: FailureKind) -> None:
        super().__init__(reason)
        self.kind = kind


def task_of(turn: Turn) -> dict[str, Any]:
    """Return the task that an agent gets: the prompt, as text or as messages with all of their fields, the
    reference answer, and the record's other fields."""
    return {"prompt": as_record(turn.prompt), "answer": turn.answer, "data": dict(turn.data)}


class CommandRunner:
    """Runs the user's agent program, a command, once for each session: the work on one sample."""

    def __init__(self, options: AgentOptions) -> None:
        """Check that commands can be started with these options. Raises RuntimeError, with the remedy, when
        they cannot."""
        limits = ProgramLimits(options.timeout_s, options.memory_mib, options.max_processes)
        is_real = options.sandbox is SandboxMode.required
        self._sandbox = Sandbox(limits, tuple(options.readable_paths), is_real)
        self._options = options
        check_sandbox(self._sandbox)

    async def run(self, turn: Turn, access: AgentAccess) -> Any:
        """Run the command to its end and return the reward that it printed, or None when it printed nothing.

        Raises Flooded, CommandFailed, and the TimeoutError of a caller's deadline.
        """
        task = json.dumps(task_of(turn), default=str).encode()
        async with AsyncExitStack() as opened:
            endpoint = await opened.enter_async_context(self._endpoint_socket(access))
            start = opened.enter_context(self._sandbox.command(self._options.command, endpoint))
            process = await asyncio.create_subprocess_exec(
                *start.command,
                pass_fds=start.pass_fds,
                cwd=start.cwd,
                env=self._environment(start.env, access),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                process_group=0,
            )
            reads = [asyncio.create_task(self._read(one)) for one in (process.stdout, process.stderr)]
            ending = asyncio.create_task(self._end_when_used_up(process.pid, start.group))
            try:
                await asyncio.gather(*reads, _give(process, task))
                said, complained = (read.result() for read in reads)
                code = await process.wait()
            finally:
                ending.cancel()
                # Also when it has ended by itself: processes that it started are in its process group.
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                # A process counts as ended once its pipes are read to their ends, by one reader each.
                for read in reads:
                    read.cancel()
                await asyncio.gather(*reads, return_exceptions=True)
                # Without a sandbox, a process that left the group lives on, and may hold the pipes open.
                with suppress(TimeoutError):
                    async with asyncio.timeout(_END_TIMEOUT_S):
                        await asyncio.gather(_drain(process.stdout), _drain(process.stderr))
                        await process.wait()
        if complained.strip():
            sys.stderr.write(complained[-_SHOWN_CHARACTERS:])
            sys.stderr.flush()
        if ending.done() and not ending.cancelled():
            ending.result()  # raises the error that ended the watch
            limit = f"options.timeout_s={self._options.timeout_s:g} s"
            reason = f"the processes of the agent's command used {limit} of CPU time together"
            raise CommandFailed(reason, FailureKind.timed_out)
        if code:
            how = how_it_ended(code)
            kind = FailureKind.died if code < 0 else FailureKind.raised
            last = (complained.strip() or said.strip())[-_SHOWN_CHARACTERS:]
            raise CommandFailed(f"the agent's command ended with {how}: {last}", kind)
        return _reward(said)

    async def _end_when_used_up(self, process: int, group: ControlGroup | None) -> None:
        """Kill the command once its processes have used ``timeout_s`` of CPU time together."""
        await until_cpu_is_used_up(process, group, self._options.timeout_s)
        with suppress(ProcessLookupError):
            os.killpg(process, signal.SIGKILL)

    @asynccontextmanager
    async def _endpoint_socket(self, access: AgentAccess) -> AsyncIterator[EndpointSocket | None]:
        """Yield the socket and port by which a command in a sandbox reaches the endpoint; None without a
        sandbox."""
        if not self._sandbox.is_real:
            yield None
            return
        url = urlsplit(access.base_url)

        async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with closing(writer):
                try:
                    theirs, ours = await asyncio.open_connection(url.hostname, url.port)
                except OSError:
                    return
                with closing(ours):
                    await _first_end(_pump(reader, ours), _pump(theirs, writer))

        with tempfile.TemporaryDirectory(prefix="agent-") as folder:
            path = Path(folder) / "endpoint"
            server = await asyncio.start_unix_server(relay, path)
            path.chmod(0o666)  # the command has a user id of its own
            try:
                yield EndpointSocket(str(path), _INNER_PORT)
            finally:
                server.close()

    def _environment(self, own: Mapping[str, str], access: AgentAccess) -> dict[str, str]:
        """Return a command's environment variables: the sandbox's, the endpoint's, and the configured
        ones."""
        url = access.base_url
        if self._sandbox.is_real:
            url = f"http://127.0.0.1:{_INNER_PORT}/v1"
        variables = {
            **own,
            "OPENAI_BASE_URL": url,
            "OPENAI_API_BASE": url,
            "OPENAI_API_KEY": access.api_key,
            "ANTHROPIC_BASE_URL": url.removesuffix("/v1"),
            "ANTHROPIC_API_KEY": access.api_key,
            **self._options.variables,
        }
        return {**variables, **no_proxy(variables, [urlsplit(url).hostname or ""])}

    async def _read(self, stream: asyncio.StreamReader | None) -> str:
        """Read a stream to its end. Raises Flooded when it is longer than ``max_output_kib``."""
        assert stream is not None
        content, limit = bytearray(), self._options.max_output_kib * 1024
        while chunk := await stream.read(_CHUNK_BYTES):
            content += chunk
            if len(content) > limit:
                raise Flooded(f"the agent's command printed more than {self._options.max_output_kib} KiB")
        return content.decode(errors="replace")


def _reward(said: str) -> Any:
    """Return the reward in the last printed line, or None when nothing was printed. Raises CommandFailed for
    a line that is no JSON."""
    last = said.strip().rpartition("\n")[2].strip()
    if not last:
        return None
    try:
        found = json.loads(last)
    except (ValueError, RecursionError) as error:
        raise CommandFailed(
            f"the last line that the agent's command printed is no reward as JSON: {last[:200]!r}",
            FailureKind.malformed,
        ) from error
    return found["reward"] if isinstance(found, dict) and "reward" in found else found


async def _drain(stream: asyncio.StreamReader | None) -> None:
    """Read a stream to its end and drop its content."""
    assert stream is not None
    while await stream.read(_CHUNK_BYTES):
        pass


async def _give(process: asyncio.subprocess.Process, content: bytes) -> None:
    """Write the task to the command's input; the command need not read it."""
    assert process.stdin is not None
    with suppress(ConnectionError):
        process.stdin.write(content)
        await process.stdin.drain()
    process.stdin.close()


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while chunk := await reader.read(_CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()


async def _first_end(*works: Any) -> None:
    """Wait until one of ``works`` has ended, then cancel the rest."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
