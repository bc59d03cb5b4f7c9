"""The calls of agents, with an engine that never answers."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

import pytest

from nemo_like.environments.interface import Failure, FailureKind, Feedback, Turn
from nemo_like.environments.shared_options import Credit
from nemo_like.generation.interface import CallSampling, GroupRequest
from nemo_like.rollout.agents.agent_calls import AgentSession, CallAnswerer, CallRequest
from nemo_like.rollout.agents.agent_endpoint import _unless_gone
from nemo_like.rollout.agents.agent_engines import EngineCalls
from nemo_like.rollout.agents.agent_request import BadRequest
from nemo_like.rollout.agents.agent_work import RequestWork
from nemo_like.rollout.agents.agents import AgentPlayer
from tests.unit.rollout.conversations import conversation

SAMPLING = CallSampling(temperature=1.0, top_p=1.0, top_k=0, max_new_tokens=8)


@dataclass
class Engine:
    """Keeps what it is asked for until that is aborted."""

    name: str = "engine-0"
    unfinished: list[str] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def submit(self, method: str, requests: Sequence[Any], *args: Any) -> None:
        if method == "abort":
            self.unfinished = [name for name in self.unfinished if name not in requests]
            return
        self.unfinished += [request.request_id for request in requests]
        self.arrived.set()


def request(name: str) -> GroupRequest:
    return GroupRequest(name, (1,), (0,))


def test_calls_of_a_session_that_is_dropped_leave_the_engine_and_those_of_others_stay() -> None:
    async def scenario() -> None:
        engine = Engine()
        calls = EngineCalls([engine], object())
        names = ("agent/a/0/1", "agent/a/0/2", "agent/b/0/1")
        tasks = [asyncio.create_task(calls.sample(0, request(name), SAMPLING)) for name in names]
        await engine.arrived.wait()
        await calls.drop(0, "agent/a/")
        for task in tasks[:2]:
            with pytest.raises(BadRequest, match="the session has ended"):
                await task
        assert engine.unfinished == ["agent/b/0/1"]
        assert calls.num_waiting == 1
        tasks[2].cancel()

    asyncio.run(scenario())


def test_a_call_that_is_dropped_before_it_is_sent_never_is() -> None:
    async def scenario() -> None:
        engine = Engine()
        calls = EngineCalls([engine], object())
        task = asyncio.create_task(calls.sample(0, request("agent/a/0/1"), SAMPLING))
        await asyncio.sleep(0)  # it is queued
        await calls.drop(0, "agent/a/")
        with pytest.raises(BadRequest):
            await task
        await asyncio.sleep(0.01)
        assert not engine.unfinished

    asyncio.run(scenario())


def test_a_call_whose_client_goes_away_leaves_the_engine_and_no_other_does() -> None:
    async def scenario() -> None:
        engine, gone = Engine(), asyncio.Event()
        calls = EngineCalls([engine], object())

        async def receive() -> dict[str, str]:
            await gone.wait()
            return {"type": "http.disconnect"}

        async def serve(name: str) -> Any:
            return await calls.sample(0, request(name), SAMPLING)

        client: Any = SimpleNamespace(receive=receive)
        other = asyncio.create_task(serve("agent/a/0/10"))
        asked = asyncio.create_task(_unless_gone(client, serve("agent/a/0/1")))
        while len(engine.unfinished) < 2:
            await asyncio.sleep(0)
        gone.set()
        with pytest.raises(BadRequest, match="disconnected"):
            await asked
        await asyncio.sleep(0.01)
        assert engine.unfinished == ["agent/a/0/10"]
        assert calls.num_waiting == 1
        other.cancel()

    asyncio.run(scenario())


def test_dropping_a_session_waits_until_the_engine_has_let_go_of_a_call_whose_client_went_away() -> None:
    """Else it would still generate when weights come."""

    async def scenario() -> None:
        lets_go = asyncio.Event()

        class Slow(Engine):
            async def submit(self, method: str, requests: Sequence[Any], *args: Any) -> None:
                if method == "abort":
                    await lets_go.wait()
                await super().submit(method, requests, *args)

        engine = Slow()
        calls = EngineCalls([engine], object())
        call = asyncio.create_task(calls.sample(0, request("agent/a/0/1"), SAMPLING))
        await engine.arrived.wait()
        call.cancel()
        await asyncio.sleep(0)
        dropping = asyncio.create_task(calls.drop(0, "agent/a/"))
        await asyncio.sleep(0.01)
        assert not dropping.done()
        lets_go.set()
        await dropping
        assert not engine.unfinished

    asyncio.run(scenario())


def _session() -> AgentSession:
    return AgentSession("a", "again", "one", conversation(), SAMPLING, 0, 3, None, max_calls=9)


class Agents:
    """One session, and what of it is still sampled when it has ended."""

    form = None

    def __init__(self, engine: Engine) -> None:
        self.engine, self.session = engine, _session()
        self.calls = EngineCalls([engine], object())
        self.answerer = CallAnswerer(_Prompts(), self.calls, 100, RequestWork())  # type: ignore[arg-type]

    def open(self, *args: Any) -> AgentSession:
        return self.session

    def access(self, session: AgentSession) -> None: ...

    def close_session(self, session: AgentSession) -> None:
        session.is_open = False

    async def drop_calls(self, session: AgentSession) -> None:
        await self.calls.drop(session.engine, session.request_ids)


class _Prompts:
    """Needs no tokenizer: calls here have tokens."""

    tokenizer = SimpleNamespace(decode=lambda ids: "", num_ids=100)


def test_an_agent_that_ends_before_its_call_is_answered_leaves_nothing_to_sample() -> None:
    """Engines that still generate take no weights, and do not sleep: the run would fail."""

    async def scenario() -> None:
        engine = Engine()
        agents = Agents(engine)
        wanted, late = CallRequest(token_ids=(5, 6)), []

        class Runner:
            async def step(self, turns: Sequence[Turn]) -> list[Feedback]:
                late.append(asyncio.create_task(agents.answerer.answer(agents.session, wanted)))
                await engine.arrived.wait()
                return [Feedback(failure=Failure(FailureKind.timed_out, "the agent took longer"))]

        options = SimpleNamespace(credit=Credit.session)
        player = AgentPlayer(agents, Runner(), options, SAMPLING, 100)  # type: ignore[arg-type]
        sample = agents.session.conversation
        await player.play(sample, 3)
        assert not engine.unfinished
        assert sample.failure is not None
        assert sample.failure.kind is FailureKind.timed_out
        with pytest.raises(BadRequest, match="has ended"):
            await late[0]
        with pytest.raises(BadRequest, match="has ended"):  # its body was read while the session ended
            await agents.answerer.answer(agents.session, wanted)

    asyncio.run(scenario())


def test_a_session_that_begins_again_is_not_blamed_for_what_its_agent_did_before() -> None:
    session = replace(_session(), flood="made more than max_calls=9 calls", num_requests=10)
    session.begin_again()
    assert session.flood is None
    assert session.num_requests == 0
