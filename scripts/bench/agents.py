#!/usr/bin/env python
"""How much of the prompts of agents' calls engines find in their KV cache, and how long sessions take.

    python scripts/bench/agents.py --model .cache/models/sums-s1 [--sessions 32] [--calls 6] [--rounds 3]

Sessions are conversations that grow by a message with every call. They are played on two engines, in turns:
each session on the engine that has its earlier calls, as in a run, and each call on the other engine than the
one before. Prints JSON: of both the share of the prompts' tokens that was cached, and the median of seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import openai

from nemo_like.batch.columnar import Columnar
from nemo_like.cluster.actors import ActorHandle, ActorSpec, Concurrency
from nemo_like.cluster.cluster import Cluster
from nemo_like.cluster.runtime import RayNeeds, ray_runtime
from nemo_like.configuration import Config, load_config
from nemo_like.data.interface import TaskPrompt
from nemo_like.data.tokenizer import Tokenizer
from nemo_like.environments.interface import Feedback, Turn
from nemo_like.environments.registry import options_of
from nemo_like.environments.shared_options import AgentOptions
from nemo_like.generation.environment import engine_environment
from nemo_like.generation.interface import GroupResult
from nemo_like.generation.sampling import SamplingSettings
from nemo_like.generation.vllm_engine import VllmEngine
from nemo_like.plan.engine_of_run import engine_of_run
from nemo_like.rollout.agents.agents import AgentPlayer, Agents
from nemo_like.rollout.conversation import Conversation, Limits
from scripts.bench.arguments import at_least

CONFIG = Path(__file__).resolve().parents[2] / "configs" / "grpo_agent_cpu.yaml"
NUM_ENGINES, MAX_LENGTH, TIMEOUT_S = 2, 4096, 600.0
_NEEDS = RayNeeds(address=None, num_cpus=8, num_gpus=0, start_timeout_s=TIMEOUT_S)
TEXT = "The quick brown fox jumps over the lazy dog. " * 4


class CountingEngine(VllmEngine):
    """Counts the tokens of prompts, and those that were in the KV cache."""

    def __init__(self, **kwargs: Any) -> None:
        self._counted = [0, 0]
        super().__init__(**kwargs)
        self._thread.call(self._watch)

    def take_counts(self) -> tuple[int, int]:
        """Tokens of prompts and cached ones among them, since the last call."""
        counted, self._counted = self._counted, [0, 0]
        return counted[0], counted[1]

    def _watch(self) -> None:
        step = self._vllm.llm.step

        def watched() -> Any:
            outputs = step()
            for one in outputs:
                if one.finished:
                    self._counted[0] += len(one.prompt_token_ids)
                    self._counted[1] += one.num_cached_tokens or 0
            return outputs

        self._vllm.llm.step = watched


class Swapped:
    """An engine whose calls go to two engines in turns."""

    def __init__(self, engines: Sequence[ActorHandle]) -> None:
        self._engines, self._count = engines, 0

    def submit(self, method: str, requests: Columnar[Any], *others: Any) -> Any:
        async def both() -> None:
            for request in requests:
                self._count += 1
                engine = self._engines[int(request.request_id.rpartition("/")[2]) % len(self._engines)]
                await engine.submit(method, Columnar([request]), *others)

        return both()


class Host:
    """Plays sessions as the rollout actor does."""

    async def attach(self, own: ActorHandle, engines: Sequence[ActorHandle], model: str) -> None:
        self._tokenizer = Tokenizer(model)
        swapped = [Swapped(engines)] * len(engines)
        self._agents = {
            "own engine": Agents(self._tokenizer, engines, own, MAX_LENGTH),
            "other engine": Agents(self._tokenizer, swapped, own, MAX_LENGTH),  # type: ignore[arg-type]
        }
        for agents in self._agents.values():
            await agents.start("127.0.0.1", [])

    def on_groups(self, results: Sequence[GroupResult]) -> None:
        for agents in self._agents.values():
            agents.on_groups(results)

    async def play(self, which: str, round_: int, num_sessions: int, num_calls: int, cfg: Config) -> float:
        """Play the sessions at the same time and return the seconds that they took."""
        options: AgentOptions = options_of(cfg.env["sums"])
        options.max_calls = num_calls
        sampling = SamplingSettings(1.0, 1.0, 0, 16, (self._tokenizer.eos_token_id,))
        player = AgentPlayer(self._agents[which], Talker(num_calls), options, sampling, 1 << 20)
        limits = Limits(1, MAX_LENGTH)
        sessions = [
            Conversation(TaskPrompt(f"{which} {round_} {place} {TEXT}", ""), (1,), place, 0, limits, place)
            for place in range(num_sessions)
        ]
        started_s = time.monotonic()
        await asyncio.gather(*(player.play(one, 0) for one in sessions))
        failed = [one.failure for one in sessions if one.failure is not None]
        if failed:
            raise RuntimeError(f"{len(failed)} sessions failed: {failed[0].reason}")
        return time.monotonic() - started_s


class Talker:
    """Runs the agents, in this process."""

    def __init__(self, num_calls: int) -> None:
        self._num_calls = num_calls
        self._client = openai.AsyncOpenAI(base_url="http://unused", api_key="unused", timeout=TIMEOUT_S)

    async def step(self, turns: Sequence[Turn]) -> Sequence[Feedback]:
        return [await self._talked(turn) for turn in turns]

    async def _talked(self, turn: Turn) -> Feedback:
        assert turn.agent is not None
        client = self._client.with_options(base_url=turn.agent.base_url, api_key=turn.agent.api_key)
        messages: list[Any] = [{"role": "user", "content": turn.prompt}]
        for _ in range(self._num_calls):
            said = await client.chat.completions.create(model="policy", messages=messages, max_tokens=16)
            messages += [said.choices[0].message, {"role": "user", "content": TEXT}]
        return Feedback({"reward": 1.0})


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", required=True, help="checkpoint directory, of a model with a chat template"
    )
    parser.add_argument("--sessions", type=at_least(1), default=32)
    parser.add_argument("--calls", type=at_least(1), default=6, help="of each session (default 6)")
    parser.add_argument("--rounds", type=at_least(1), default=3)
    options = parser.parse_args()
    cfg = load_config(CONFIG, [f"policy.model_name={Path(options.model).absolute()}"])
    with ray_runtime(_NEEDS, warn=print):
        cluster = Cluster()
        try:
            print(json.dumps(measured(cluster, cfg, options), indent=2))
        finally:
            cluster.stop()
    return 0


def measured(cluster: Cluster, cfg: Config, options: argparse.Namespace) -> dict[str, Any]:
    """Play the rounds, both ways in turns."""
    engines = [cluster.start(_engine(cfg, index)) for index in range(NUM_ENGINES)]
    host = cluster.start(
        ActorSpec(
            name="host",
            target="scripts.bench.agents:Host",
            concurrency=Concurrency.asyncio,
            env={"OMP_NUM_THREADS": "1"},
        )
    )

    def call(actor: ActorHandle, method: str, *arguments: Any) -> Any:
        return cluster.gather([actor.submit(method, *arguments)], stage="bench", timeout_s=TIMEOUT_S)[0]

    call(host, "attach", host, engines, str(cfg.policy.model_name))
    ways = ("own engine", "other engine")
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    counts = {way: [0, 0] for way in ways}
    for round_ in range(options.rounds + 1):
        for way in ways:
            took_s = call(host, "play", way, round_, options.sessions, options.calls, cfg)
            taken = [call(engine, "take_counts") for engine in engines]
            if round_:  # the first one also loads what later ones use
                seconds[way].append(took_s)
                counts[way] = [sum(pair) for pair in zip(counts[way], *taken, strict=True)]
    return {
        way: {
            "seconds": round(statistics.median(seconds[way]), 3),
            "prompt_tokens": counts[way][0],
            "cached_share": round(counts[way][1] / counts[way][0], 4),
        }
        for way in ways
    }


def _engine(cfg: Config, index: int) -> ActorSpec:
    spec = replace(engine_of_run(cfg), max_total_sequence_length=MAX_LENGTH, seed=0)
    return ActorSpec(
        name=f"engine-{index}",
        target="scripts.bench.agents:CountingEngine",
        kwargs={"name": f"engine-{index}", "spec": spec, "timeout_s": TIMEOUT_S},
        env=engine_environment(spec.device),
    )


if __name__ == "__main__":
    sys.exit(main())
