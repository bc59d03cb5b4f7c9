"""Tools of MCP servers, programs that the environment starts; responses call them in text.

    response with calls     ──▶ each is made in turn ──▶ the observation: their results
    response without a call ──▶ done; ``tool_pool`` has another environment judge it

A server serves all conversations of its actor, so its tools must keep no state of a conversation.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import Any

from mcp import Client, MCPError, StdioServerParameters, stdio_client
from mcp.types import CONNECTION_CLOSED

from nemo_like.environments.interface import FailureKind, Feedback, Turn
from nemo_like.environments.kinds.mcp import McpOptions
from nemo_like.environments.tool_calls import UnreadableCall, read_call

_START_TIMEOUT_S = 60.0  # for all servers to start and to list their tools
_END_TIMEOUT_S = 30.0  # for all servers to end; each is killed after a few seconds


class McpEnvironment:
    """Makes the tool calls in responses; the calls of different responses run side by side."""

    def __init__(self, options: McpOptions) -> None:
        """Keep the options; the first call starts the servers."""
        self._options = options
        self._pattern = re.compile(options.call_pattern, re.DOTALL)
        self._servers: McpServers | None = None
        self._starting = asyncio.Lock()

    async def step(self, turns: Sequence[Turn]) -> Sequence[Feedback]:
        """Return one feedback per turn, in order: an observation, or an end without a reward."""
        return list(await asyncio.gather(*(self._answered(turn) for turn in turns)))

    async def _answered(self, turn: Turn) -> Feedback:
        calls = [match.group(1) for match in self._pattern.finditer(turn.response)]
        if not calls or turn.is_last:  # nobody would see a result
            return Feedback(metrics={"calls_per_turn": 0.0})
        try:
            servers = await self._started()
            try:
                results = [await self._called(servers, call) for call in calls]
            except (OSError, RuntimeError, TimeoutError):
                await self._give_up(servers)
                raise
        except (OSError, RuntimeError, TimeoutError) as error:
            return Feedback.failed(FailureKind.died, f"an MCP server failed: {type(error).__name__}: {error}")
        shown = [self._options.result_template.replace("{result}", text) for text, _ in results]
        num_refused = sum(not is_good for _, is_good in results)
        metrics = {"calls_per_turn": float(len(calls)), "refused_call_share": num_refused / len(calls)}
        return Feedback(observation="".join(shown), is_done=False, metrics=metrics)

    async def _started(self) -> McpServers:
        async with self._starting:
            if self._servers is None:
                servers = McpServers(self._options)
                await servers.start()
                self._servers = servers
            return self._servers

    async def _give_up(self, servers: McpServers) -> None:
        """End all servers, since one has failed; the next call starts new ones."""
        if self._servers is servers:  # no other turn has done so
            self._servers = None
            await servers.end()

    async def _called(self, servers: McpServers, call: str) -> tuple[str, bool]:
        """Make a call; return the result as the policy sees it, and whether the tool accepted the call.

        A malformed call returns an error text for the policy, which wrote it.
        """
        try:
            name, arguments = read_call(call)
        except UnreadableCall:
            return 'error: a call is {"name": ..., "arguments": {...}} in JSON', False
        text, is_good = await servers.call(name, arguments)
        limit = self._options.max_result_characters
        return (text if len(text) <= limit else f"{text[:limit]}..."), is_good


class McpServers:
    """The running servers of an environment, held open by a task of their own."""

    def __init__(self, options: McpOptions) -> None:
        self._options = options
        self._clients: dict[str, Client] = {}  # by the name of a tool
        self._tools: list[dict[str, Any]] = []
        self._is_ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._shall_end = asyncio.Event()
        self._task: asyncio.Task[None]

    @property
    def tools(self) -> tuple[Mapping[str, Any], ...]:
        """The tools of all servers, in the form of OpenAI's API and of chat templates."""
        return tuple(self._tools)

    async def start(self) -> None:
        """Start all servers and ask for their tools.

        Raises RuntimeError when two tools have the same name, TimeoutError, and the errors of a server's
        start.
        """
        self._task = asyncio.get_running_loop().create_task(self._run())
        ready = {self._task, self._is_ready}
        await asyncio.wait(ready, timeout=_START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        if self._task.done():
            self._task.result()
        if not self._is_ready.done():
            await self.end()
            raise TimeoutError(f"the servers did not list their tools within {_START_TIMEOUT_S:g} s")

    async def end(self) -> None:
        """End all servers; a server that does not end within some seconds is left behind."""
        if self._is_ready.done():
            self._shall_end.set()
        else:
            self._task.cancel()
        await asyncio.wait({self._task}, timeout=_END_TIMEOUT_S)

    async def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[str, bool]:
        """Call a tool; return its text, and whether it accepted the call. Raises RuntimeError when the
        servers have ended."""
        client = self._clients.get(name)
        if client is None:
            return f"error: there is no tool {name!r}; there are {', '.join(sorted(self._clients))}", False
        if self._task.done():
            raise RuntimeError("the servers have ended")
        try:
            async with asyncio.timeout(self._options.call_timeout_s):
                result = await client.call_tool(name, dict(arguments))
        except MCPError as error:
            if error.code == CONNECTION_CLOSED:
                raise RuntimeError(f"it closed its connection while {name!r} was called") from error
            return f"error: {error.message}", False
        except TimeoutError:
            return f"error: no answer within {self._options.call_timeout_s:g} s", False
        text = "\n".join(part.text for part in result.content if part.type == "text")
        return (f"error: {text}", False) if result.is_error else (text, True)

    async def _run(self) -> None:
        async with AsyncExitStack() as running:
            for name, server in self._options.servers.items():
                program, *arguments = server["command"]
                parameters = StdioServerParameters(
                    command=program, args=arguments, env=server.get("env") or None
                )
                client = await running.enter_async_context(Client(stdio_client(parameters)))
                for tool in (await client.list_tools()).tools:
                    if tool.name in self._clients:
                        raise RuntimeError(f"options.servers.{name} has a second tool {tool.name!r}")
                    self._clients[tool.name] = client
                    self._tools.append(_described(tool))
            self._is_ready.set_result(None)
            await self._shall_end.wait()


def listed_tools(options: McpOptions) -> tuple[Mapping[str, Any], ...]:
    """Start all servers, list their tools, and end the servers.

    Raises ValueError when a server does not start, or does not list its tools.
    """

    async def listed() -> tuple[Mapping[str, Any], ...]:
        servers = McpServers(options)
        await servers.start()
        await servers.end()
        return servers.tools

    # In a thread of its own, since the caller's may run an event loop.
    with ThreadPoolExecutor(1) as thread:
        try:
            return thread.submit(lambda: asyncio.run(listed())).result()
        except Exception as error:
            cause = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            raise ValueError(f"its tools cannot be listed: {type(cause).__name__}: {cause}") from error


def _described(tool: Any) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description or "",
        "parameters": tool.input_schema,
    }
    return {"type": "function", "function": function}
