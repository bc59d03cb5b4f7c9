"""Environments of verifiers that have a single seat, which the policy takes.

    the environment's own run() ──▶ the seat: agents.<name>.run(task) or .interaction(task).turn(message)
                                       │ asks for a reply        ▲ the next response
                                       ▼                         │
                            the policy's turn: an observation ───┘

The seat keeps a trace as verifiers' own agents do, and has the task score it. It runs no program: there is no
harness and no runtime, so tasks that need either, or tools, are refused.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import verifiers.v1 as vf
from hub_interface import HubFailure, HubPrompt, TurnOutcome
from verifiers.v1.configs.agent import agent_config_fields
from verifiers.v1.graph import prepare_turn
from verifiers.v1.state import state_cls
from verifiers.v1.trace import AgentInfo, TraceTask
from verifiers.v1.types import AssistantMessage, Response, SystemMessage, UserMessage, content_text
from verifiers.v1.utils.loaders import load_environment, resolve_env_config

_RUNTIME_HOOKS = ("setup", "finalize", "stage_verifier")


class VerifiersHub:
    """The tasks of a taskset, and the environment that plays them."""

    def __init__(self, env: dict[str, Any]) -> None:
        """Load the environment of verifiers' configuration ``env``.

        Raises ValueError for an environment with several seats, or with tasks that need more than messages.
        """
        config = resolve_env_config(env)
        self._env = load_environment(config)
        seats = [*agent_config_fields(config)]
        if len(seats) != 1:
            raise ValueError(f"it has the seats {', '.join(seats)}; the policy plays one alone")
        self._seat = seats[0]
        task_type = type(self._env.taskset).task_type()
        if lacking := [*_lacking(task_type, self._env.taskset, config)]:
            raise ValueError(f"its tasks need {', '.join(lacking)}, which a turn of text does not have")
        self._tasks: list[Any] = []

    async def prompts(self, size: int, seed: int) -> list[HubPrompt]:
        """Return the tasks number ``seed`` to ``seed + size - 1`` of the taskset, in its own order."""
        chosen = self._tasks_until(seed + size)[seed:]
        return [
            HubPrompt([_as_openai(one, index) for one in _messages(task)], {"index": index})
            for index, task in enumerate(chosen, start=seed)
        ]

    async def open(self, data: dict[str, Any]) -> VerifiersEpisode:
        index = int(data["index"])
        tasks = self._tasks_until(index + 1)
        if index >= len(tasks):
            raise HubFailure("raised", f"the taskset has no task {index}")
        episode = VerifiersEpisode(self._env, self._seat, tasks[index])
        await episode.begin()
        return episode

    def _tasks_until(self, stop: int) -> list[Any]:
        if len(self._tasks) < stop:
            self._tasks = [*itertools.islice(self._env.taskset, stop)]
        return self._tasks


def _lacking(task_type: Any, taskset: Any, config: Any) -> Any:
    """Yield what tasks of this type need beyond messages, in words."""
    if task_type.NEEDS_CONTAINER:
        yield "a container"
    if task_type.toolsets(taskset.config.task) or type(taskset).toolsets(taskset.config):
        yield "tools (a toolset)"
    for hook in _RUNTIME_HOOKS:
        if getattr(task_type, hook) is not getattr(vf.Task, hook):
            yield f"a runtime ({task_type.__name__}.{hook})"
    for name, function in inspect.getmembers(task_type, callable):
        if any(hasattr(function, mark) for mark in ("stop", "intercept")):
            yield f"a harness ({task_type.__name__}.{name} stops or intercepts it)"
        if any(hasattr(function, mark) for mark in ("reward", "metric")) and _needs_runtime(function):
            yield f"a runtime ({task_type.__name__}.{name})"


def _needs_runtime(function: Any) -> bool:
    parameter = inspect.signature(function).parameters.get("runtime")
    return parameter is not None and parameter.default is inspect.Parameter.empty


def _messages(task: Any) -> list[Any]:
    """Return a task's prompt as messages of verifiers. Raises HubFailure for a task whose user begins."""
    data = task.data
    if data.prompt is None:
        raise HubFailure("raised", f"task {data.idx} has no prompt: its user begins, and the policy cannot")
    messages = [] if data.system_prompt is None else [SystemMessage(content=data.system_prompt)]
    if isinstance(data.prompt, str):
        return [*messages, UserMessage(content=data.prompt)]
    return [*messages, *data.prompt]


def _as_openai(message: Any, index: int) -> dict[str, Any]:
    """Return a message of task ``index`` with all of its fields, and its tool calls in OpenAI's form.

    Raises HubFailure for a message with an image.
    """
    if not isinstance(message.content, str | None) and any(one.type != "text" for one in message.content):
        raise HubFailure("raised", f"task {index} has an image in its prompt, which is not served")
    # The native items of a provider are for its own API.
    fields = message.model_dump(exclude_none=True, exclude={"provider_state"})
    if calls := fields.pop("tool_calls", None):
        fields["tool_calls"] = [
            {
                "id": call["id"],
                "type": call["type"],
                "function": {"name": call["name"], "arguments": call["arguments"]},
            }
            for call in calls
        ]
    return {**fields, "content": content_text(message.content)}


class VerifiersEpisode:
    """One run of the environment, which waits for the policy whenever it asks the seat for a reply."""

    def __init__(self, env: Any, seat: str, task: Any) -> None:
        self._env, self._task = env, task
        self._seat = Seat(self)
        self._agents = _Agents(seat, self._seat)
        self._asked: asyncio.Queue[str] = asyncio.Queue()  # what the environment said to the seat
        self._replies: asyncio.Queue[str | None] = asyncio.Queue()  # None: there is no further turn
        self.traces: list[Any] = []
        self._running: asyncio.Task[None]

    async def begin(self) -> None:
        """Run the environment until it asks for the first reply; the policy already has the prompt of that
        reply."""
        self._running = asyncio.get_running_loop().create_task(self._run())
        if await self._said() is None:
            raise HubFailure("raised", "the environment ended before it asked for a reply")

    async def step(self, response: str, is_last: bool) -> TurnOutcome:
        self._replies.put_nowait(response)
        said = await self._said()
        if said is not None and not is_last:
            return TurnOutcome(said)
        if said is not None:  # the conversation ends here, and is judged as it stands
            self._replies.put_nowait(None)
            await self._running
        rewards = {
            name: None if reward is None else float(reward.value)
            for trace in self.traces
            for name, reward in trace.rewards.items()
        }
        metrics = {
            name: float(value)
            for trace in self.traces
            for name, value in trace.metrics.items()
            if value is not None
        }
        return TurnOutcome("", rewards, said is None, metrics)

    async def close(self) -> None:
        self._running.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await self._running

    async def reply(self, said: str) -> str | None:
        """Send a message to the policy, and wait for its reply; None when there is no further turn."""
        self._asked.put_nowait(said)
        return await self._replies.get()

    async def _said(self) -> str | None:
        """Return the environment's next message to the seat, or None when it has ended. Raises the
        environment's error."""
        asked = asyncio.get_running_loop().create_task(self._asked.get())
        await asyncio.wait({asked, self._running}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result()
        asked.cancel()
        self._running.result()
        return None

    async def _run(self) -> None:
        env, task = self._env, self._task
        await env.setup(self._agents)
        await env.run(task, self._agents)
        traced = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        episode = vf.Episode(env=vf.EnvInfo(id=env.config.env_id), task=traced)
        episode.traces.extend(self.traces)
        await env.finalize(task, episode)


class _Agents:
    """The environment's agents by the names of their seats; there is one."""

    def __init__(self, name: str, seat: Seat) -> None:
        setattr(self, name, seat)


class Seat:
    """The policy in the role of an agent of verifiers."""

    trainable = True

    def __init__(self, episode: VerifiersEpisode) -> None:
        self._episode = episode

    async def run(self, task: Any, **others: Any) -> Any:
        """Have the policy reply once to the task's prompt; return the scored trace."""
        async with self.interaction(task, **others) as interaction:
            await interaction.turn()
        return interaction.trace

    @asynccontextmanager
    async def interaction(self, task: Any, **others: Any) -> AsyncIterator[SeatInteraction]:
        """Hold a conversation that begins with the task's prompt; have the task score it at its end."""
        if given := sorted(name for name, value in others.items() if value):
            raise HubFailure("raised", f"the seat has no {', '.join(given)}")
        interaction = SeatInteraction(self._episode, task)
        yield interaction
        await task.score(interaction.trace)
        interaction.trace.is_completed = interaction.trace.ok = True
        self._episode.traces.append(interaction.trace)


class SeatInteraction:
    """One conversation of the seat, with the interface of ``verifiers.v1.Interaction``."""

    def __init__(self, episode: VerifiersEpisode, task: Any) -> None:
        self._episode = episode
        traced = TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash)
        agent = AgentInfo(config=vf.AgentConfig())
        self.trace = vf.Trace(task=traced, state=state_cls(type(task))(), agent=agent)
        self._said = _messages(task)

    async def turn(self, message: Any = None) -> Any:
        """Send ``message``, a text or user messages, and return the segment with the policy's reply."""
        texts: list[str] = []
        if message is not None:
            new = [UserMessage(content=message)] if isinstance(message, str) else [*message]
            texts = [content_text(one.content) for one in new]
            self._said += new
        response = await self._episode.reply("\n".join(texts))
        if response is None:
            self.trace.stop("max_turns")
            return vf.Segment(messages=[], terminated=True)
        reply = AssistantMessage(content=response)
        turn = prepare_turn(self.trace, self._said)
        turn.commit(Response(id="", created=0, model="policy", message=reply, finish_reason="stop"))
        self._said.append(reply)
        self.trace.root_reply = response
        return vf.Segment(messages=[reply], root_reply=response)
