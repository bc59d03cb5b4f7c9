"""A session of an agent, and how each of its calls is answered: the same for every API.

API's body ──▶ CallRequest ──▶ tokens of the prompt ──▶ engine ──▶ recorded ──▶ Choice ──▶ API's answer
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from nemo_like.algorithms.message_flags import NO_FLAG, MessageFlag
from nemo_like.data.interface import Prompt
from nemo_like.data.messages import as_openai
from nemo_like.environments.interface import Failure, FailureKind
from nemo_like.generation.interface import TOP_TOKEN_IDS, CallSampling, GroupRequest, Response
from nemo_like.generation.sampling import SamplingSettings
from nemo_like.rollout.agents.agent_engines import EngineCalls
from nemo_like.rollout.agents.agent_prompts import AgentPrompts, plain_messages
from nemo_like.rollout.agents.agent_request import BadRequest, PromptTooLong, check_token_ids
from nemo_like.rollout.agents.agent_session import (
    AgentCall,
    Digest,
    SessionCalls,
    canonical,
    extended,
    histories,
    no_history,
)
from nemo_like.rollout.agents.agent_tools import ParsedText, ToolUse, parsed
from nemo_like.rollout.agents.agent_work import RequestWork
from nemo_like.rollout.conversation import Conversation
from nemo_like.rollout.prompts import turn_seed
from nemo_like.rollout.response_form import ResponseForm

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
_BYTES_PER_TOKEN = 96  # of an answer, with the log-prob


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRequest:
    """What one call of an agent asks for, whichever API the agent used."""

    messages: Sequence[dict[str, Any]] | None = None  # as ``plain_messages`` returns them
    text: str | None = None  # or a prompt of plain text
    token_ids: tuple[int, ...] | None = None  # or a prompt of tokens
    template: Mapping[str, Any] = field(default_factory=dict)  # arguments for the template from the request
    tool_schemas: Sequence[Mapping[str, Any]] = ()  # the template describes them in the prompt
    tools: ToolUse | None = None
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    top_logprobs: int = 0
    num_bytes: int = 0  # of the request

    @property
    def context(self) -> dict[str, Any]:
        """What the chat template gets beside the messages."""
        return {**self.template, **({"tools": [*self.tool_schemas]} if self.tool_schemas else {})}


@dataclass(frozen=True, slots=True)
class Choice:
    """One response to a call, with the tool calls that were read from it."""

    index: int
    text: str  # without the stop token or stop string that ended it
    parsed: ParsedText
    response: Response
    call_ids: tuple[str, ...]  # an id for each tool call in the response
    stopped_by: str | None = None  # the agent's stop string that ended it

    @property
    def finish_reason(self) -> str:
        """OpenAI's word for why the response ended."""
        if self.parsed.calls:
            return "tool_calls"
        return "length" if self.response.is_truncated else "stop"


@dataclass(frozen=True, slots=True)
class CallAnswer:
    """All responses to one call, with the numbers of tokens of prompt and responses."""

    name: str
    choices: tuple[Choice, ...]
    num_prompt_tokens: int
    num_continued: int  # prompt tokens that an earlier call already had
    num_response_tokens: int

    @property
    def num_bytes(self) -> int:
        """An estimate of how many bytes the answer has as JSON, with its log-probs."""
        tops = (choice.response.columns.get(TOP_TOKEN_IDS, np.zeros(0)).size for choice in self.choices)
        return _BYTES_PER_TOKEN * (self.num_response_tokens + sum(tops))


@dataclass(eq=False, slots=True)
class AgentSession:
    """One agent at work on one sample: its key, its calls so far, and what it did wrong."""

    key: str
    restart_key: str
    name: str  # part of its request ids, which logs and journals show
    conversation: Conversation
    sampling: SamplingSettings
    engine: int  # index of the engine that gets all its calls
    policy_version: int
    tool_parser: str | None
    max_calls: int
    calls: SessionCalls = field(default_factory=SessionCalls)
    attempt: int = 0  # a session begins anew where its agent's process died
    num_requests: int = 0
    num_unanswered: int = 0  # calls under way
    is_open: bool = True
    cut_off: str | None = None  # the error, if a prompt was longer than the model reads
    flood: str | None = None  # the limit that the agent exceeded, in words
    is_history_foreign: bool = False  # its first request contains a response that the policy never gave
    reward: dict[str, float | None] | None = None  # reported by the agent with POST /reward
    times_asked: dict[bytes, int] = field(default_factory=dict)  # by the digest of a prompt

    @property
    def request_ids(self) -> str:
        """The beginning that the ids of all requests of this session share."""
        return f"agent/{self.name}/"

    def check_open(self, attempt: int) -> None:
        """Raise BadRequest when the session has ended, or has begun anew since ``attempt``."""
        if not self.is_open or self.attempt != attempt:
            raise BadRequest("the session has ended", status=410, code="session_ended")

    def count_request(self) -> None:
        """Count one more request. Raises BadRequest beyond ``max_calls``, with a status after which no client
        asks again."""
        self.num_requests += 1
        if self.num_requests > self.max_calls:
            self.flood = f"made more than max_calls={self.max_calls} calls"
            raise BadRequest(f"the agent {self.flood}", status=403, code="max_calls_exceeded")

    def begin_again(self) -> None:
        """Forget everything that the agent did; calls under way will not be recorded."""
        self.attempt += 1
        self.calls, self.num_requests, self.times_asked = SessionCalls(), 0, {}
        self.reward, self.cut_off, self.num_unanswered, self.flood = None, None, 0, None
        self.is_history_foreign = False

    def call_after_end(self) -> None:
        """Fail the sample because its agent called after it had ended. A sample that was already put into the
        data plane keeps its reward."""
        if self.conversation.failure is None:
            reason = "the agent called the endpoint after it had ended"
            self.conversation.fail(Failure(FailureKind.malformed, reason), self.policy_version)

    def seed(self, token_ids: Sequence[int], seed: int | None, count: int) -> int:
        """Return the first of ``count`` consecutive seeds for a prompt.

        The seed depends on the sample, the prompt, and how often the session has asked this prompt, so that
        parallel calls get the same seeds in any order. A seed chosen by the agent replaces that count; the
        samples of a group still differ.
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
    """The prompt of one call: the earlier call that it continues, and its new text and tokens."""

    parent: AgentCall | None
    text: str
    new_ids: tuple[int, ...]
    history: Digest | None  # of the messages before the response
    begun: Mapping[str, Any] = field(default_factory=dict)  # the message that the response continues


class CallAnswerer:
    """Answers the calls of all sessions: renders the prompt, has an engine sample, and records the
    response."""

    def __init__(
        self,
        prompts: AgentPrompts,
        engines: EngineCalls,
        max_length: int,
        work: RequestWork,
        form: ResponseForm | None = None,
    ) -> None:
        """Answer with ``engines``. ``max_length`` is how many tokens the model reads, prompt and response
        together; ``work`` runs the rendering beside the event loop; ``form`` is what responses are looked
        through for."""
        self._prompts, self._engines, self._max_length = prompts, engines, max_length
        self._work, self._form = work, form

    async def answer(self, session: AgentSession, wanted: CallRequest) -> CallAnswer:
        """Have an engine sample the responses to a call, and record them. Raises BadRequest when the call
        cannot be served."""
        session.check_open(session.attempt)  # it may have ended while the request was read
        session.count_request()
        attempt, name = session.attempt, f"{session.num_requests}"
        session.num_unanswered += 1
        try:
            prompt, token_ids, is_foreign = await self._prepared(session, wanted)
            session.check_open(attempt)
            session.is_history_foreign |= is_foreign and name == "1"
            sampling = self._sampling(session, wanted, len(token_ids))
            first = session.seed(token_ids, wanted.seed, wanted.n)
            seeds = tuple(range(first, first + wanted.n))
            # The engine has not read the last token that an earlier call sampled.
            num_known = max(0, len(token_ids) - len(prompt.new_ids) - 1)
            request = GroupRequest(
                f"{session.request_ids}{attempt}/{name}", token_ids, seeds, num_known=num_known
            )
            result = await self._engines.sample(session.engine, request, sampling)
        except PromptTooLong as error:
            if session.attempt == attempt:
                session.cut_off = str(error)
            raise
        finally:
            session.num_unanswered -= session.attempt == attempt
        session.check_open(attempt)
        choices = tuple(
            self._recorded(session, prompt, wanted, name, place, response, result.policy_version)
            for place, response in enumerate(result.responses)
        )
        num_sampled = sum(len(choice.response.token_ids) for choice in choices)
        num_continued = len(token_ids) - len(prompt.new_ids)
        return CallAnswer(name, choices, len(token_ids), num_continued, num_sampled)

    async def count_tokens(self, session: AgentSession, wanted: CallRequest) -> int:
        """Return how many tokens the prompt of a call would have. Raises BadRequest when it cannot be
        rendered."""
        _, token_ids, _ = await self._prepared(session, wanted)
        return len(token_ids)

    async def _prepared(
        self, session: AgentSession, wanted: CallRequest
    ) -> tuple[_Prompt, tuple[int, ...], bool]:
        """Return a call's prompt, all tokens of the prompt, and whether it begins a new conversation that
        contains a response written by neither the policy nor the task."""
        calls, limit = session.calls, self._limit(session)
        if wanted.messages is not None:
            self._prompts.check_arguments(wanted.template)
            of_source = session.conversation.task_prompt.template
            wanted = replace(wanted, template={**of_source, **wanted.template})

        def prepare() -> tuple[_Prompt, tuple[int, ...], bool]:
            prompt = self._prompt(calls, wanted, limit)
            if prompt.parent is not None:
                return prompt, (*prompt.parent.token_ids(), *prompt.new_ids), False
            return (
                prompt,
                prompt.new_ids,
                _has_foreign_response(wanted, session.conversation.task_prompt.prompt),
            )

        return await self._work.run(wanted.num_bytes, prepare)

    def _limit(self, session: AgentSession) -> int:
        """Return how many tokens a prompt and its response may have together."""
        return min(self._max_length, session.conversation.limits.max_tokens)

    def _prompt(self, calls: SessionCalls, wanted: CallRequest, limit: int) -> _Prompt:
        if wanted.messages is None:
            return self._text_prompt(calls, wanted, limit)
        self._prompts.check_length(wanted.messages, limit)
        context = wanted.context
        if wanted.messages[-1]["role"] == "assistant":
            return self._begun_prompt(wanted.messages, context)
        known = histories(context, wanted.messages)
        parent, count = calls.known(known, wanted.messages)
        if parent is None:
            text, before = self._prompts.whole(wanted.messages, context), None
        else:
            text = self._prompts.after(parent, *_as_one(wanted.messages, count), context)
            before = self._prompts.tokenizer.written_end(parent.last_token_id)
        return _Prompt(parent, text, self._prompts.encode(text, before), known[-1])

    def _begun_prompt(self, messages: Sequence[dict[str, Any]], template: Mapping[str, Any]) -> _Prompt:
        """Return a prompt whose last message is the assistant's and will be continued by the response. The
        whole prompt is new: an earlier call's response may already have its end token, so it cannot be
        continued."""
        text = self._prompts.whole(messages, template)
        history = [no_history(template), *histories(template, messages[:-1])][-1]
        return _Prompt(None, text, self._prompts.encode(text), history, messages[-1])

    def _text_prompt(self, calls: SessionCalls, wanted: CallRequest, limit: int) -> _Prompt:
        """Return a prompt of plain text or tokens, without a template. It continues the longest earlier call
        whose text or tokens it begins with."""
        if (ids := wanted.token_ids) is not None:
            check_token_ids(ids, self._prompts.tokenizer.num_ids)
            parent = calls.longest(lambda call: ids[: call.num_tokens] == call.token_ids())
            new_ids = ids[parent.num_tokens if parent else 0 :]
            return _Prompt(parent, self._prompts.tokenizer.decode(new_ids), tuple(new_ids), None)
        text = wanted.text or ""
        self._prompts.check_length([{"role": "user", "content": text}], limit)
        parent = calls.longest(lambda call: text.startswith(call.whole_text()))
        if parent is None:
            return _Prompt(None, text, self._prompts.encode_text_prompt(text), None)
        new = text[len(parent.whole_text()) :]
        return _Prompt(parent, new, self._prompts.encode(new, parent.last_token_id), None)

    def _sampling(self, session: AgentSession, wanted: CallRequest, num_prompt_tokens: int) -> CallSampling:
        if not num_prompt_tokens:
            raise BadRequest("the prompt is empty")
        limit = self._limit(session)
        left = limit - num_prompt_tokens
        if left < 1:
            raise PromptTooLong(num_prompt_tokens, limit)
        settings = {one.name: getattr(session.sampling, one.name) for one in fields(SamplingSettings)}
        most = min(left, settings["max_new_tokens"], wanted.max_tokens or settings["max_new_tokens"])
        return CallSampling(
            **{
                **settings,
                "max_new_tokens": most,
                "stop_strings": (*settings["stop_strings"], *wanted.stop),
                **({"structured_outputs": wanted.tools.structured_outputs} if wanted.tools else {}),
            },
            num_top_logprobs=wanted.top_logprobs,
        )

    def _recorded(
        self,
        session: AgentSession,
        prompt: _Prompt,
        wanted: CallRequest,
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
            flags=self._flags(text, said, response),
        )
        if prompt.history is not None and prompt.begun:
            # Agents may also keep what they began and what came back as two messages.
            session.calls.know(extended(extended(prompt.history, prompt.begun), message), call)
        return Choice(place, text, said, response, call_ids, stopped_by)

    def _flags(self, text: str, said: ParsedText, response: Response) -> MessageFlag:
        """Return what is wrong with a response, where the run looks for it."""
        if self._form is None:
            return NO_FLAG
        unread, num_calls = said.content or "", len(said.calls)
        return self._form.of_parts(text, unread, num_calls=num_calls, is_truncated=response.is_truncated)


def _has_foreign_response(wanted: CallRequest, prompt: Prompt) -> bool:
    """Return whether the messages hold a response that is not in the task's own prompt.

    The last message is not looked at: the agent may have begun it for the policy.
    """
    own = [] if isinstance(prompt, str) else plain_messages([as_openai(message) for message in prompt])
    known = {canonical(message) for message in own}
    said = (message for message in (wanted.messages or ())[:-1] if message["role"] == "assistant")
    return any(canonical(message) not in known for message in said)


def _call_id(request: str, place: int, number: int) -> str:
    """Return an id for a tool call that is unique in the session. It has nine letters and digits, because
    chat templates of Mistral refuse other ids."""
    digest = hashlib.blake2b(f"{request}/{place}/{number}".encode(), digest_size=8).digest()
    return np.base_repr(int.from_bytes(digest, "big") % 36**9, 36).rjust(9, "0").lower()


def _as_one(messages: Sequence[dict[str, Any]], num_known: int) -> tuple[Sequence[dict[str, Any]], int]:
    """Drop the message with which an agent began a response, since templates may refuse two assistant
    messages in a row.

    The first ``num_known`` messages end with that response. Return the messages that are left, and
    ``num_known`` for them.
    """
    if num_known < 2 or messages[num_known - 2]["role"] != "assistant":
        return messages, num_known
    return [*messages[: num_known - 2], *messages[num_known - 1 :]], num_known - 1


def assistant_message(said: ParsedText, call_ids: Sequence[str]) -> dict[str, Any]:
    """Return a response as a message in the form that ``plain_messages`` gives it when the agent sends it
    back."""
    message: dict[str, Any] = {"role": "assistant", "content": said.content}
    if said.calls:
        message["tool_calls"] = tool_calls(said, call_ids)
    return plain_messages([message])[0]


def tool_calls(said: ParsedText, call_ids: Sequence[str]) -> list[dict[str, Any]]:
    """Return the tool calls of a response in OpenAI's form."""
    return [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}
        for call_id, (name, arguments) in zip(call_ids, said.calls, strict=True)
    ]
