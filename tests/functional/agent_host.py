"""An actor that has agents hold conversations, as the rollout actor does, and says what became of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import psutil

from nemo_like.batch.columns import PARENT_GAPS
from nemo_like.cluster.actors import ActorHandle
from nemo_like.data.interface import TaskPrompt
from nemo_like.data.tokenizer import Tokenizer
from nemo_like.environments.options import EnvConfig
from nemo_like.environments.registry import options_of
from nemo_like.environments.server import EnvironmentServer
from nemo_like.generation.interface import GroupResult
from nemo_like.generation.sampling import SamplingSettings
from nemo_like.rollout.agents.agents import AgentPlayer, Agents
from nemo_like.rollout.conversation import Conversation, Limits
from tests.unit.batch.forests import forest_from

POLICY_VERSION = 7
_MAX_SESSION_TOKENS, _MAX_NEW_TOKENS = 65536, 32


class AgentHost:
    """Real sessions and endpoint, and real environment processes."""

    def __init__(self, checkpoint: str, max_length: int) -> None:
        self._checkpoint, self._max_length = checkpoint, max_length
        self._agents: Agents
        self._servers: dict[str, EnvironmentServer] = {}

    async def attach(self, own: ActorHandle, engines: Sequence[ActorHandle]) -> None:
        self._tokenizer = Tokenizer(self._checkpoint)
        self._agents = Agents(self._tokenizer, engines, own, self._max_length)
        await self._agents.start("127.0.0.1", ["hermes"])

    def on_groups(self, results: Sequence[GroupResult]) -> None:
        self._agents.on_groups(results)

    def on_engine_error(self, engine: str, message: str) -> None:
        self._agents.fail(RuntimeError(f"{engine}: {message}"))

    async def play(
        self, env: EnvConfig, prompts: Sequence[str], num_generations: int = 1, agent: str | None = None
    ) -> list[dict[str, Any]]:
        """Play each prompt so often; return what became of each session, in the order of the prompts.

        The problems say their places, and the name of the ``agent``.
        """
        name = repr(env)
        server = self._servers.setdefault(name, EnvironmentServer("agents", env))
        await server.start()
        eos = self._tokenizer.eos_token_id
        sampling = SamplingSettings(1.0, 1.0, 0, _MAX_NEW_TOKENS, (eos,))
        player = AgentPlayer(self._agents, server, options_of(env), sampling, _MAX_SESSION_TOKENS)
        conversations = [
            Conversation(
                TaskPrompt(prompt, "102", {"place": place, "agent": agent}, env="agents"),
                tuple(self._tokenizer.encode_prompt(prompt)),
                place,
                generation,
                Limits(1, self._max_length),
                seed=(1000 * place + generation) * 64,
            )
            for place, prompt in enumerate(prompts)
            for generation in range(num_generations)
        ]
        await asyncio.gather(*(player.play(one, POLICY_VERSION) for one in conversations))
        await asyncio.sleep(env.options["arguments"].get("late_s", 0))
        player.forget(conversations)
        return [_told(one) for one in conversations]

    def memory_mib(self) -> float:
        """Of this process and of those in which agents run."""
        own = psutil.Process()
        return sum(one.memory_info().rss for one in (own, *own.children(recursive=True))) / 2**20

    async def close(self) -> None:
        await self._agents.close()
        await asyncio.gather(*(server.close() for server in self._servers.values()))


def _told(conversation: Conversation) -> dict[str, Any]:
    return {
        "reward": conversation.reward,
        "rewards": dict(conversation.rewards),
        "failure": None if conversation.failure is None else conversation.failure.kind.name,
        "reason": None if conversation.failure is None else conversation.failure.reason,
        "metrics": dict(conversation.metric_sums),
        "policy_version": conversation.policy_version,
        "branches": _branches(conversation) if conversation.passages else [],
    }


def _branches(conversation: Conversation) -> list[dict[str, Any]]:
    """By token run: the tokens of its path, and which of them train in this run, with their log-probs."""
    passages = [conversation.prompt_passage, *conversation.passages]
    none = [np.zeros(len(one.token_ids)) for one in passages]
    ids = np.concatenate([one.token_ids for one in passages])
    gaps = [one.columns.get(PARENT_GAPS.name, zero) for one, zero in zip(passages, none, strict=True)]
    given = [zero if one.logprobs is None else one.logprobs for one, zero in zip(passages, none, strict=True)]
    trains = np.concatenate([one.trains for one in passages]) > 0
    logprobs = np.where(trains, np.concatenate(given), 0.0)
    parents = (np.arange(len(ids)) - 1 - np.concatenate(gaps)).astype(int).tolist()
    branches = []
    for path in forest_from(parents).paths():
        places = [token for piece in path for token in range(*piece)]
        is_own = np.array(places) >= path[-1].start
        branches.append(
            {
                "ids": ids[places].tolist(),
                "mask": (trains[places] & is_own).tolist(),
                "logprobs": np.where(is_own, logprobs[places], 0.0).tolist(),
            }
        )
    return branches
