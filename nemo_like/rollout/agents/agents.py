"""Lets agents hold conversations: opens a session for each, asks its environment to run the agent, and turns
the agent's calls into tokens of the conversation.

    conversation ──▶ session, with a key ──▶ environment: runs the agent ──▶ its reward ─┐
                        ▲ calls, answered by the endpoint                                ▼
                        └──────── agent                        conversation with tokens and reward
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Protocol

from nemo_like.batch.columns import PARENT_GAPS
from nemo_like.data.tokenizer import Tokenizer
from nemo_like.environments.interface import (
    UNSAID_SHARE,
    AgentAccess,
    Exchange,
    Failure,
    FailureKind,
    Feedback,
    Turn,
)
from nemo_like.environments.shared_options import AgentOptions, Credit
from nemo_like.generation.interface import GroupResult
from nemo_like.generation.sampling import SamplingSettings
from nemo_like.rollout.agents.agent_calls import AgentSession, CallAnswerer
from nemo_like.rollout.agents.agent_endpoint import AgentEndpoint
from nemo_like.rollout.agents.agent_engines import EngineCalls
from nemo_like.rollout.agents.agent_prompts import AgentPrompts
from nemo_like.rollout.agents.agent_session import Step
from nemo_like.rollout.agents.agent_tools import AgentTools
from nemo_like.rollout.agents.agent_work import RequestWork
from nemo_like.rollout.agents.session_tokens import laid_out
from nemo_like.rollout.conversation import Conversation, EndReason
from nemo_like.rollout.response_form import ResponseForm
from nemo_like.rollout.turn_loop import Engine


class AgentRunner(Protocol):
    """Runs agents. The pool of an agent environment is one."""

    async def step(self, turns: Sequence[Turn]) -> Sequence[Feedback]: ...


@dataclass(frozen=True, slots=True)
class AgentPlayer:
    """The ``Player`` of one agent environment: it lets an agent hold each conversation."""

    agents: Agents
    runner: AgentRunner
    options: AgentOptions
    sampling: SamplingSettings
    max_tokens: int  # of a session, all branches together

    async def play(self, conversation: Conversation, policy_version: int) -> None:
        """Let an agent hold the conversation; end it with the tokens of the agent's calls and with the
        reward."""
        session = self.agents.open(conversation, self.options, self.sampling, policy_version)
        try:
            turn = replace(conversation.turn(), agent=self.agents.access(session))
            (feedback,) = await self.runner.step([turn])
        finally:
            self.agents.close_session(session)
        _end(session, feedback, self.options.credit, self.max_tokens)
        if self.agents.form is not None:
            flags = [call.flags for call in session.calls.calls]
            conversation.count_flags(flags, self.agents.form.watched)
        await self.agents.drop_calls(session)

    def forget(self, conversations: Sequence[Conversation]) -> None:
        """Forget the sessions of these conversations."""
        self.agents.forget(conversations)


class Agents:
    """All agents of a rollout actor, and the endpoint that they call. Use it on one event loop only."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        engines: Sequence[Engine],
        sink: object,
        max_length: int,
        form: ResponseForm | None = None,
    ) -> None:
        """Prepare the endpoint. ``max_length`` is how many tokens the model reads; engines deliver results to
        ``sink``, which passes them to ``on_groups``; ``form`` is what responses are looked through for."""
        self.form = form
        self._sessions: dict[str, AgentSession] = {}
        self._engines = EngineCalls(engines, sink)
        self._tools, self._work = AgentTools(tokenizer), RequestWork()
        answerer = CallAnswerer(AgentPrompts(tokenizer), self._engines, max_length, self._work, form)
        self._endpoint = AgentEndpoint(self._sessions, answerer, self._tools, tokenizer, self._work)
        self._base_url = ""

    async def start(self, host: str, tool_parsers: Sequence[str]) -> None:
        """Serve at ``host``, and check that vLLM has these tool parsers. Raises ValueError for one that it
        lacks."""
        self._base_url = await self._endpoint.start(host)
        for parser in tool_parsers:
            await self._tools.check(parser)

    async def close(self) -> None:
        """Stop serving."""
        await self._endpoint.close()
        self._work.close()

    def move_to(self, engines: Sequence[Engine]) -> None:
        """Use these engines from now on; some may be new."""
        self._engines.move_to(engines)

    def on_groups(self, results: Sequence[GroupResult]) -> None:
        """Take the results of an engine's step; ignore results that no agent waits for."""
        self._engines.on_groups(results)

    def fail(self, error: BaseException) -> None:
        """End all sessions, and raise ``error`` in every call that waits."""
        for session in self._sessions.values():
            session.is_open = False
        self._sessions.clear()
        self._engines.fail(error)

    def open(
        self,
        conversation: Conversation,
        options: AgentOptions,
        sampling: SamplingSettings,
        policy_version: int,
    ) -> AgentSession:
        """Open a session for a conversation. All samples of a prompt share one engine, so that its cache
        holds their earlier calls."""
        key = f"sk-{secrets.token_hex(16)}"
        session = self._sessions[key] = AgentSession(
            key=key,
            restart_key=secrets.token_hex(16),
            name=secrets.token_hex(8),
            conversation=conversation,
            sampling=sampling,
            engine=conversation.position % self._engines.num_engines,
            policy_version=policy_version,
            tool_parser=options.tool_parser,
            max_calls=options.max_calls,
        )
        return session

    def access(self, session: AgentSession) -> AgentAccess:
        """Return the URL and the keys with which an agent reaches its session."""
        return AgentAccess(self._base_url, session.key, session.restart_key)

    def close_session(self, session: AgentSession) -> None:
        """Refuse all further calls of a session."""
        session.is_open = False
        self._endpoint.forget(session)

    async def drop_calls(self, session: AgentSession) -> None:
        """Abort the requests that the engine still samples for a session that has ended."""
        await self._engines.drop(session.engine, session.request_ids)

    def forget(self, conversations: Sequence[Conversation]) -> None:
        """Forget the sessions of conversations that have ended; later calls with their keys are refused as
        unknown."""
        ended = {id(one) for one in conversations}
        gone = [key for key, session in self._sessions.items() if id(session.conversation) in ended]
        for key in gone:
            del self._sessions[key]


def _end(session: AgentSession, feedback: Feedback, credit: Credit, max_tokens: int) -> None:
    """End a session's conversation: give it the tokens of its branches, and the reward or the failure."""
    conversation = session.conversation
    branches = session.calls.branches()
    if branches:
        trained = branches if credit is Credit.session else [_last(branches)]
        _take_branches(session, trained)
    conversation.policy_version = session.policy_version
    metrics = {
        "num_calls": len(session.calls.calls),
        "num_branches": len(branches),
        UNSAID_SHARE: float(session.is_history_foreign),
    }
    rewards = feedback.rewards or session.reward or {}
    failure = _failure(session, feedback.failure, rewards)
    if failure is None and conversation.num_tokens > max_tokens:
        failure = Failure(
            FailureKind.flooded,
            f"the session has {conversation.num_tokens} distinct tokens in {len(branches)} branches, and a "
            f"micro-batch holds {max_tokens}",
        )
    if failure is not None:
        _keep_one_branch(conversation)
        feedback = Feedback(failure=failure, metrics={**feedback.metrics, **metrics})
    else:
        feedback = replace(feedback, rewards=rewards, metrics={**feedback.metrics, **metrics}, is_done=True)
    conversation.add_feedback(feedback)
    if session.cut_off is not None and failure is None:
        conversation.end = EndReason.token_limit


def _keep_one_branch(conversation: Conversation) -> None:
    """Drop all tokens after the first branch from a sample that will not train."""
    is_start = [PARENT_GAPS.name in passage.columns for passage in conversation.passages]
    if any(is_start):
        conversation.passages = conversation.passages[: is_start.index(True)]


def _failure(
    session: AgentSession, failed: Failure | None, rewards: Mapping[str, float | None]
) -> Failure | None:
    """Return why a session has no reward, or None when it has one. ``failed`` is the agent's own failure, or
    None.

    A refusal by the endpoint comes first, since most agents raise an error when they are refused.
    """
    then = "" if failed is None else f"; then: {failed.reason}"
    if session.flood is not None:
        return Failure(FailureKind.flooded, f"the agent {session.flood}{then}")
    if session.cut_off is not None and not session.calls.calls:
        return Failure(FailureKind.flooded, f"the agent's first call was refused: {session.cut_off}{then}")
    if failed is not None:
        return failed
    if not session.calls.calls:
        return Failure(
            FailureKind.malformed,
            "the agent made no call to the endpoint; a client that keeps responses in a cache must not do so",
        )
    if session.num_unanswered:
        return Failure(
            FailureKind.malformed,
            f"the agent ended before {session.num_unanswered} of its calls were answered",
        )
    if not rewards:
        return Failure(FailureKind.malformed, "the agent returned no reward, and reported none")
    return None


def _last(branches: Sequence[Sequence[Step]]) -> Sequence[Step]:
    """Return the branch that contains the session's last call."""
    return max(branches, key=lambda branch: max(step.call.number for step in branch))


def _take_branches(session: AgentSession, branches: Sequence[Sequence[Step]]) -> None:
    """Set the conversation's tokens to those of the branches, each token once."""
    conversation, calls = session.conversation, session.calls.calls
    conversation.prompt_ids = branches[0][0].call.new_ids
    conversation.passages = laid_out(branches)[1:]
    conversation.num_turns = len(calls)
    conversation.latest_response = calls[-1].text
    conversation.latest_is_truncated = calls[-1].response.is_truncated
    conversation.history = [
        Exchange(call.text, after.new_text if after.parent is call else f"\n{after.new_text}")
        for call, after in pairwise(calls)
    ]
    conversation.observed_images = [()] * len(conversation.history)
