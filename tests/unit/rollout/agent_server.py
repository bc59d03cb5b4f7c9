"""A real endpoint on loopback, with an engine that answers every call with the same text."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from nemo_like.data.tokenizer import Tokenizer
from nemo_like.environments.interface import Feedback, Turn
from nemo_like.environments.shared_options import AgentOptions, Credit, SandboxMode
from nemo_like.generation.interface import CallSampling, GroupRequest, GroupResult, Response
from nemo_like.generation.sampling import SamplingSettings
from nemo_like.rollout.agents.agent_calls import AgentSession
from nemo_like.rollout.agents.agents import AgentPlayer, Agents
from nemo_like.rollout.conversation import Conversation
from nemo_like.rollout.response_form import ResponseForm
from tests.unit.rollout.conversations import conversation

MAX_LENGTH = 1000


@dataclass
class Engine:
    """Says ``text`` to each prompt, and ends it; keeps the prompts."""

    tokenizer: Tokenizer
    text: str = "yes"
    name: str = "engine-0"
    prompts: list[str] = field(default_factory=list)
    agents: Agents = field(init=False)

    async def submit(self, method: str, groups: Sequence[Any], *args: Any) -> None:
        if method == "submit":
            self.agents.on_groups([self._answered(group, args[0]) for group in groups])

    def _answered(self, group: GroupRequest, sampling: CallSampling) -> GroupResult:
        self.prompts.append(self.tokenizer.decode(group.prompt_ids))
        ids = np.array([*self.tokenizer.encode_text(self.text), self.tokenizer.eos_token_id], np.int32)
        response = Response(ids, np.zeros(len(ids), np.float32), is_truncated=False)
        return GroupResult(group.request_id, tuple(response for _ in group.seeds), 0)


@dataclass
class Server:
    agents: Agents
    engine: Engine
    base_url: str
    http: httpx.AsyncClient

    def open(self, max_calls: int = 10, sample: Conversation | None = None) -> AgentSession:
        options = AgentOptions(**{**_OPTIONS, "max_calls": max_calls})
        held = sample or conversation(max_tokens=MAX_LENGTH)
        return self.agents.open(held, options, _sampling(self.engine.tokenizer), 0)

    async def post(self, session: AgentSession, path: str, body: Any) -> httpx.Response:
        """``body`` is JSON, or bytes."""
        own = {"content": body} if isinstance(body, bytes) else {"json": body}
        return await self.http.post(f"/{path}", headers={"x-api-key": session.key}, **own)

    async def play(self, agent: Any, max_calls: int = 10, **example: Any) -> Conversation:
        """Have an agent, which gets the base URL and the key and returns a feedback, hold a conversation."""
        sample = conversation(max_tokens=MAX_LENGTH, **example)
        options = AgentOptions(**{**_OPTIONS, "max_calls": max_calls})

        class Runner:
            async def step(self, turns: Sequence[Turn]) -> list[Feedback]:
                (turn,) = turns
                assert turn.agent is not None
                return [await agent(turn.agent.base_url, turn.agent.api_key)]

        player = AgentPlayer(self.agents, Runner(), options, _sampling(self.engine.tokenizer), MAX_LENGTH)
        await player.play(sample, 0)
        return sample


_OPTIONS: dict[str, Any] = {
    "agent": "x:y",
    "arguments": {},
    "command": [],
    "variables": {},
    "credit": Credit.session,
    "tool_parser": None,
    "tool_choice": "auto",
    "max_calls": 10,
    "timeout_s": 10.0,
    "memory_mib": 100,
    "max_processes": 1,
    "max_output_kib": 1,
    "sandbox": SandboxMode.required,
    "readable_paths": [],
}


def _sampling(tokenizer: Tokenizer) -> SamplingSettings:
    return SamplingSettings(1.0, 1.0, 0, 50, tokenizer.end_token_ids)


@asynccontextmanager
async def serving(tokenizer: Tokenizer, form: ResponseForm | None = None) -> AsyncIterator[Server]:
    engine = Engine(tokenizer)
    engine.agents = agents = Agents(tokenizer, [engine], None, MAX_LENGTH, form)
    await agents.start("127.0.0.1", [])
    first = agents.open(conversation(), AgentOptions(**_OPTIONS), _sampling(tokenizer), 0)
    base_url = agents.access(first).base_url
    try:
        async with httpx.AsyncClient(base_url=base_url, trust_env=False, timeout=60) as http:
            yield Server(agents, engine, base_url, http)
    finally:
        await agents.close()
