"""A session of an agent, and how each of its calls is answered: the same for every API.

API's body ──▶ Wanted ──▶ tokens of the prompt ──▶ engine ──▶ recorded ──▶ Choice ──▶ API's answer
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from nemo_like.config.tasks import SamplingSettings
from nemo_like.environments.interface import Failure, FailureKind
from nemo_like.generation.interface import CallSampling, GroupRequest, Response
from nemo_like.rollout.agent_engines import EngineCalls
from nemo_like.rollout.agent_prompts import AgentPrompts, BadRequest, plain_messages
from nemo_like.rollout.agent_session import AgentCall, Digest, SessionCalls, extended, histories, no_history
from nemo_like.rollout.agent_tools import ParsedText, ToolUse, parsed
from nemo_like.rollout.conversation import Conversation
from nemo_like.rollout.prompts import turn_seed

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a call asks for, in any API."""

    messages: Sequence[dict[str, Any]] | None = None  # as ``plain_messages`` returns them
    text: str | None = None  # or a prompt of plain text
    token_ids: tuple[int, ...] | None = None  # or its tokens
    template: Mapping[str, Any] = field(default_factory=dict)  # further arguments of the chat template
    tools: ToolUse | None = None
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    top_logprobs: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """One response to a call."""

    index: int
    text: str  # without what ended it
    parsed: ParsedText
    response: Response
    call_ids: tuple[str, ...]  # of the calls of tools that it makes
    stopped_by: str | None = None  # the agent's stop string that ended it

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for why the response ended."""
        if self.parsed.calls:
            return "tool_calls"
        return "length" if self.response.is_truncated else "stop"


@dataclass(frozen=True, slots=True)
class Answered:
    """The responses to a call, and how long its prompt was."""

    name: str
    choices: tuple[Choice, ...]
    num_prompt_tokens: int
    num_continued: int  # of these, tokens of an earlier call
    num_response_tokens: int


@dataclass(eq=False, slots=True)
class AgentSession:
    """One agent at work on one sample."""

    key: str
    restart_key: str
    name: str  # in the names of its requests, which logs and journals have
    conversation: Conversation
    sampling: SamplingSettings
    engine: int  # where all its calls go
    policy_version: int
    tool_parser: str | None
    max_calls: int
    calls: SessionCalls = field(default_factory=SessionCalls)
    attempt: int = 0  # a session begins anew where its agent's process died
    num_requests: int = 0
    num_unanswered: int = 0  # calls under way
    is_open: bool = True
    is_cut_off: bool = False  # a prompt was longer than the model reads
    flood: str | None = None  # what it did too much of
    reward: dict[str, float | None] | None = None  # that the agent reported by POST /reward
    times_asked: dict[bytes, int] = field(default_factory=dict)  # of each prompt

    @property
    def request_ids(self) -> str:
        """What the ids of all its requests begin with."""
        return f"agent/{self.name}/"

    def begin_again(self) -> None:
        """Forget what the agent did; calls that are under way will not be recorded."""
        self.attempt += 1
        self.calls, self.num_requests, self.times_asked = SessionCalls(), 0, {}
        self.reward, self.is_cut_off, self.num_unanswered, self.flood = None, False, 0, None

    def call_after_end(self) -> None:
        """Note that the agent called although it had ended: its sample has no reward, unless it is on its way
        to the trainer already."""
        if self.conversation.failure is None:
            reason = "the agent called the endpoint after it had ended"
            self.conversation.fail(Failure(FailureKind.malformed, reason), self.policy_version)

    def seed(self, token_ids: Sequence[int], seed: int | None, count: int) -> int:
        """Return the first of ``count`` seeds for a prompt.

        It depends on the sample, the prompt and how often this was asked, and so not on the order in which
        calls come that are made side by side. A seed that the agent chose takes the place of how often: the
        samples of a group differ nevertheless.
        """
        prompt = hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=8).digest()
        if seed is None:
            times = self.times_asked[prompt] = self.times_asked.get(prompt, 0) + 1
            chosen = f"{times}"
        else:
            chosen = f"seed {seed}"
        mixed = int.from_bytes(hashlib.blake2b(prompt + chosen.encode(), digest_size=4).digest(), "big")
        return turn_seed(self.conversation.seed, mixed) // count * count


@dataclass(frozen=True, slots=True)
class _Prompt:
    """A call's prompt: what it continues, and what is new."""

    parent: AgentCall | None
    text: str
    new_ids: tuple[int, ...]
    history: Digest | None  # of the messages before the one that has the response
    begun: Mapping[str, Any] = field(default_factory=dict)  # that message, where the prompt begins it


class CallAnswerer:
    """Answers the calls of all sessions."""

    def __init__(self, prompts: AgentPrompts, engines: EngineCalls, max_length: int) -> None:
        """``max_length`` is how many tokens the model reads, prompt and response together."""
        self._prompts, self._engines, self._max_length = prompts, engines, max_length

    async def answer(self, session: AgentSession, wanted: Wanted) -> Answered:
        """Have a call sampled, and record it. Raises BadRequest where it cannot be."""
        if not session.is_open:  # it ended while the request was read
            raise BadRequest("the session has ended", status=410, code="session_ended")
        session.num_requests += 1
        if session.num_requests > session.max_calls:
            session.flood = f"made more than max_calls={session.max_calls} calls"
            raise BadRequest(session.flood, status=429, code="rate_limit_exceeded")
        attempt, calls = session.attempt, session.calls
        prompt = self._prompt(calls, wanted)
        before = prompt.parent.token_ids() if prompt.parent is not None else ()
        token_ids = (*before, *prompt.new_ids)
        sampling = self._sampling(session, wanted, len(token_ids))
        first = session.seed(token_ids, wanted.seed, wanted.n)
        name = f"{session.num_requests}"
        request = GroupRequest(
            f"{session.request_ids}{attempt}/{name}", token_ids, tuple(range(first, first + wanted.n))
        )
        session.num_unanswered += 1
        try:
            result = await self._engines.sample(session.engine, request, sampling)
        finally:
            session.num_unanswered -= session.attempt == attempt
        if not session.is_open or session.attempt != attempt:
            raise BadRequest("the session has ended", status=410, code="session_ended")
        choices = tuple(
            self._recorded(session, prompt, wanted, name, place, response, result.policy_version)
            for place, response in enumerate(result.responses)
        )
        num_sampled = sum(len(choice.response.token_ids) for choice in choices)
        return Answered(name, choices, len(token_ids), len(before), num_sampled)

    def _prompt(self, calls: SessionCalls, wanted: Wanted) -> _Prompt:
        if wanted.messages is None:
            return self._text_prompt(calls, wanted)
        if wanted.messages[-1]["role"] == "assistant":
            return self._begun_prompt(wanted.messages, wanted.template)
        known = histories(wanted.template, wanted.messages)
        parent, count = calls.known(known, wanted.messages)
        if parent is None:
            text, before = self._prompts.whole(wanted.messages, wanted.template), None
        else:
            text = self._prompts.after(parent, *_as_one(wanted.messages, count), wanted.template)
            before = self._prompts.tokenizer.written_end(parent.last_token_id)
        return _Prompt(parent, text, self._prompts.encode(text, before), known[-1])

    def _begun_prompt(self, messages: Sequence[dict[str, Any]], template: Mapping[str, Any]) -> _Prompt:
        """Return a prompt that ends in a message of the assistant, which the response continues. It continues
        no call, whose response may have an end."""
        text = self._prompts.whole(messages, template)
        history = [no_history(template), *histories(template, messages[:-1])][-1]
        return _Prompt(None, text, self._prompts.encode(text), history, messages[-1])

    def _text_prompt(self, calls: SessionCalls, wanted: Wanted) -> _Prompt:
        """Return a prompt without a template; it continues the call whose text or tokens it begins with."""
        if (ids := wanted.token_ids) is not None:
            parent = calls.longest(lambda call: ids[: call.num_tokens] == call.token_ids())
            new_ids = ids[parent.num_tokens if parent else 0 :]
            return _Prompt(parent, self._prompts.tokenizer.decode(new_ids), tuple(new_ids), None)
        text = wanted.text or ""
        parent = calls.longest(lambda call: text.startswith(call.whole_text()))
        if parent is None:
            return _Prompt(None, text, self._prompts.encode_text_prompt(text), None)
        new = text[len(parent.whole_text()) :]
        return _Prompt(parent, new, self._prompts.encode(new, parent.last_token_id), None)

    def _sampling(self, session: AgentSession, wanted: Wanted, num_prompt_tokens: int) -> CallSampling:
        left = min(self._max_length, session.conversation.limits.max_tokens) - num_prompt_tokens
        if not num_prompt_tokens:
            raise BadRequest("the prompt is empty")
        if left < 1:
            session.is_cut_off = True
            raise BadRequest(
                f"the prompt has {num_prompt_tokens} tokens, which leaves no room for a response in "
                f"{left + num_prompt_tokens}",
                code="context_length_exceeded",
            )
        settings = {one.name: getattr(session.sampling, one.name) for one in fields(SamplingSettings)}
        limit = min(left, settings["max_new_tokens"], wanted.max_tokens or settings["max_new_tokens"])
        return CallSampling(
            **{
                **settings,
                "max_new_tokens": limit,
                "stop_strings": (*settings["stop_strings"], *wanted.stop),
            },
            structured_outputs=wanted.tools.structured_outputs if wanted.tools else None,
            num_top_logprobs=wanted.top_logprobs,
        )

    def _recorded(
        self,
        session: AgentSession,
        prompt: _Prompt,
        wanted: Wanted,
        name: str,
        place: int,
        response: Response,
        version: int,
    ) -> Choice:
        ids = response.token_ids.tolist()
        text, stopped_by = self._prompts.text_of(ids, session.sampling.stop_token_ids, wanted.stop)
        said = parsed(text, wanted.tools)
        call_ids = tuple(_call_id(name, place, number) for number in range(len(said.calls)))
        history = None
        if prompt.history is not None:
            message = assistant_message(said, call_ids)
            content = prompt.begun.get("content", "") + message["content"]
            history = extended(prompt.history, {**prompt.begun, **message, "content": content})
        new = (prompt.new_ids, prompt.text)
        call = session.calls.add(
            prompt.parent,
            new,
            (response, f"{text}{stopped_by or ''}"),
            history=history,
            policy_version=version,
        )
        if prompt.history is not None and prompt.begun:
            # Agents may also keep what they began and what came back as two messages.
            session.calls.know(extended(extended(prompt.history, prompt.begun), message), call)
        return Choice(place, text, said, response, call_ids, stopped_by)


def _call_id(request: str, place: int, number: int) -> str:
    """Return the id of a call, which no other of the session has: nine letters and digits, since templates of
    Mistral refuse others."""
    digest = hashlib.blake2b(f"{request}/{place}/{number}".encode(), digest_size=8).digest()
    return np.base_repr(int.from_bytes(digest, "big") % 36**9, 36).rjust(9, "0").lower()


def _as_one(messages: Sequence[dict[str, Any]], num_known: int) -> tuple[Sequence[dict[str, Any]], int]:
    """Return messages, of which the first ``num_known`` end with a response, and that number, without what an
    agent began of the response in a message before it: templates may refuse two such messages."""
    if num_known < 2 or messages[num_known - 2]["role"] != "assistant":
        return messages, num_known
    return [*messages[: num_known - 2], *messages[num_known - 1 :]], num_known - 1


def assistant_message(said: ParsedText, call_ids: Sequence[str]) -> dict[str, Any]:
    """Return a response as ``plain_messages`` will find it when the agent sends it back."""
    message: dict[str, Any] = {"role": "assistant", "content": said.content}
    if said.calls:
        message["tool_calls"] = tool_calls(said, call_ids)
    return plain_messages([message])[0]


def tool_calls(said: ParsedText, call_ids: Sequence[str]) -> list[dict[str, Any]]:
    """Return the calls of tools as OpenAI writes them."""
    return [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, (name, arguments) in zip(call_ids, said.calls, strict=True)
    ]
