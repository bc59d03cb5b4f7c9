"""Runs agents: functions, classes with tools, and commands, which call the policy at an endpoint.

    task, base URL, key ──▶ agent ──▶ a reward, or None if it reported one to the endpoint

Each agent has ``timeout_s``. An agent that raises, hangs or answers badly costs only its own sample.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import threading
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any
from urllib.parse import urlsplit

import httpx

from nemo_like.cluster.proxies import bypass_proxies
from nemo_like.config.import_path import load_by_path
from nemo_like.environments.agent_command import CommandFailed, CommandRunner, Flooded, task_of
from nemo_like.environments.interface import AgentAccess, FailureKind, Feedback, Turn
from nemo_like.environments.shared_options import AgentOptions
from nemo_like.environments.tool_loop import play_with_tools
from nemo_like.environments.user_code import feedback_of

# ``agent(task, base_url, api_key)`` returns its reward, directly or as an awaitable.
Agent = Callable[[Mapping[str, Any], str, str], Any]

_RESTART_TIMEOUT_S = 30.0
_MAX_SHOWN_CHARACTERS = 2000
_MAX_IDLE_CONNECTIONS = 16
_MAX_THREADS = 4096  # for sessions under way and for sessions that hang


def agent(options: AgentOptions) -> AgentEnvironment:
    """Make the environment; configs/env/agent.yaml explains its options. Raises ValueError when the function,
    class or sandbox does not exist."""
    return AgentEnvironment(options)


class AgentEnvironment:
    """Runs one agent for each turn. Such a turn has no response yet: the agent asks the policy for all of
    them."""

    def __init__(self, options: AgentOptions) -> None:
        """Load the agent. Raises ValueError when it cannot be loaded, RuntimeError when a command cannot be
        started as configured."""
        self._options = options
        self._threads = ThreadPoolExecutor(_MAX_THREADS, "agent")
        self._num_playing = 0
        self._abandoned: set[threading.Event] = set()
        self._run: Callable[[Turn, AgentAccess], Awaitable[Any]]
        if options.command:
            self._run = CommandRunner(options).run
        else:
            loaded = load_by_path(str(options.agent))
            self._run = partial(self._with_tools if inspect.isclass(loaded) else self._called, loaded)

    async def step(self, turns: Sequence[Turn]) -> Sequence[Feedback]:
        """Run the agents of the turns side by side and return one feedback per turn, in order; a failed one
        when the agent fails."""
        self._num_playing += len(turns)
        # The agents of this process call the endpoint by clients of their own, which would use a proxy.
        bypass_proxies({urlsplit(turn.agent.base_url).hostname or "" for turn in turns if turn.agent})
        try:
            return list(await asyncio.gather(*(self._played(turn) for turn in turns)))
        finally:
            self._num_playing -= len(turns)
            self._end_if_clogged()

    async def _played(self, turn: Turn) -> Feedback:
        assert turn.agent is not None, "the rollout opens a session for each turn of an agent"
        try:
            await _begin_again(turn.agent)
            async with asyncio.timeout(self._options.timeout_s):
                answer = await self._run(turn, turn.agent)
            return Feedback() if answer is None else feedback_of(self._run_name, answer)
        except TimeoutError:
            limit = f"options.timeout_s={self._options.timeout_s:g} s"
            return Feedback.failed(FailureKind.timed_out, f"the agent took longer than {limit}")
        except Flooded as error:
            return Feedback.failed(FailureKind.flooded, str(error))
        except CommandFailed as error:
            return Feedback.failed(error.kind, str(error))
        except Exception as error:
            traceback.print_exc()
            reason = f"the agent raised {type(error).__name__}: {error}"
            return Feedback.failed(FailureKind.raised, reason[:_MAX_SHOWN_CHARACTERS])

    @property
    def _run_name(self) -> Callable[..., Any]:
        """A function whose name is the agent's, for messages about a wrong reward."""

        def agent() -> None: ...

        agent.__name__ = self._options.agent or " ".join(self._options.command)
        return agent

    async def _called(self, function: Agent, turn: Turn, access: AgentAccess) -> Any:
        """Call the user's function; a function that is not async runs in a thread of its own."""
        arguments = (task_of(turn), access.base_url, access.api_key)
        call = partial(function, *arguments, **self._options.arguments)
        if inspect.iscoroutinefunction(function):
            return await call()
        is_done = threading.Event()
        try:
            answer = await asyncio.get_running_loop().run_in_executor(
                self._threads, partial(_in_thread, call, is_done)
            )
        finally:
            if not is_done.is_set():
                self._abandoned.add(is_done)
        return await answer if inspect.isawaitable(answer) else answer

    async def _with_tools(self, kind: Callable[..., Any], turn: Turn, access: AgentAccess) -> Any:
        """Make the user's class and let the policy call its methods as tools."""
        return await play_with_tools(
            partial(kind, **self._options.arguments),
            task_of(turn),
            access,
            tool_choice=self._options.tool_choice,
            max_calls=self._options.max_calls,
        )

    def _end_if_clogged(self) -> None:
        """End this process when no agent runs but abandoned threads still hang, since nothing else ends a
        thread. The environment's server then starts a new process."""
        self._abandoned = {one for one in self._abandoned if not one.is_set()}
        if self._abandoned and not self._num_playing:
            asyncio.get_running_loop().call_later(1.0, self._exit_if_idle)

    def _exit_if_idle(self) -> None:
        if not self._num_playing and any(not one.is_set() for one in self._abandoned):
            os._exit(0)


def _in_thread(call: Callable[[], Any], is_done: threading.Event) -> Any:
    try:
        return call()
    finally:
        is_done.set()


async def _begin_again(access: AgentAccess) -> None:
    """Have the endpoint forget the calls that an earlier process made in this session."""
    headers = {"Authorization": f"Bearer {access.api_key}"}
    proof = {"restart_key": access.restart_key}
    answer = await _client().post(f"{access.base_url}/session/restart", headers=headers, json=proof)
    answer.raise_for_status()


@cache
def _client() -> httpx.AsyncClient:
    """Return the process's one client of the endpoint: making a client for each session would take longer
    than many sessions. The endpoint is plain HTTP, so no certificate is loaded."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=_MAX_IDLE_CONNECTIONS)
    return httpx.AsyncClient(trust_env=False, verify=False, timeout=_RESTART_TIMEOUT_S, limits=limits)
