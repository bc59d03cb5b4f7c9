"""The calls of one agent, as trees whose paths are the branches of its sample. Pure.

    call 1 ──▶ call 2 ──▶ call 3        one branch: the agent only added to the conversation
                  └─────▶ call 4        a second one: another branch, in which calls 1 and 2 are context
    call 5 ──▶ call 6                   a third one: a sub-agent, or a history that was edited

A call continues the tokens of an earlier call when its messages begin with that call's messages and response.
Tokens that were generated are never tokenised again, and each trains in exactly one branch.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

from nemo_like.algorithms.message_flags import NO_FLAG, MessageFlag
from nemo_like.generation.interface import Response

# A digest of a history: the tools, and all messages up to one.
Digest = bytes

# The marks that models write around their thoughts. Clients cut thoughts out of a text, or write them anew.
_BEGINS_THOUGHT, _ENDS_THOUGHT = re.compile("<think(?:ing)?>"), re.compile("</think(?:ing)?>")


@dataclass(eq=False, slots=True)
class AgentCall:
    """One response of the policy, and the tokens that its prompt has beyond the parent call."""

    number: int  # in the order in which the responses came, from 0
    parent: AgentCall | None  # the call whose tokens this one continues
    new_ids: tuple[int, ...]  # prompt tokens after the parent's response; without a parent, the whole prompt
    new_text: str  # the text of new_ids
    response: Response
    text: str  # of the response
    policy_version: int
    flags: MessageFlag = NO_FLAG  # what is wrong with the response
    children: list[AgentCall] = field(default_factory=list)

    def token_ids(self) -> tuple[int, ...]:
        """Return all tokens of the prompt and of the response."""
        parts = ((*call.new_ids, *call.response.token_ids.tolist()) for call in self.path())
        return tuple(chain.from_iterable(parts))

    @property
    def num_tokens(self) -> int:
        """The length of ``token_ids()``."""
        return sum(len(call.new_ids) + len(call.response.token_ids) for call in self.path())

    @property
    def last_token_id(self) -> int:
        """The last token of the response."""
        return int(self.response.token_ids[-1])

    def whole_text(self) -> str:
        """Return the text of prompt and response."""
        return "".join(f"{call.new_text}{call.text}" for call in self.path())

    def path(self) -> list[AgentCall]:
        """Return the calls from the root to this one."""
        path = [self]
        while (parent := path[-1].parent) is not None:
            path.append(parent)
        return path[::-1]


@dataclass(frozen=True, slots=True)
class Step:
    """A call on the path of a branch. The branch either trains its response or has it as context only."""

    call: AgentCall
    trains: bool


class SessionCalls:
    """The calls of one session so far."""

    def __init__(self) -> None:
        self.calls: list[AgentCall] = []
        self._by_history: dict[Digest, list[AgentCall]] = {}

    def known(
        self, history: Sequence[Digest], messages: Sequence[Mapping[str, Any]]
    ) -> tuple[AgentCall | None, int]:
        """Return the call that these messages continue, and how many of the messages that call's tokens
        contain; None and 0 when they continue no call. ``history[i]`` is the digest of the first i + 1
        messages.

        Several calls may have responses that differ in their thoughts alone. Then it is the latest call whose
        response was sent back with its own thoughts, else the latest.
        """
        for place in range(len(history) - 1, -1, -1):
            if calls := self._by_history.get(history[place]):
                said = messages[place].get("content") or ""
                own = (call for call in reversed(calls) if call.text.startswith(said))
                return next(own, calls[-1]), place + 1
        return None, 0

    def add(
        self,
        parent: AgentCall | None,
        new: tuple[tuple[int, ...], str],
        response: tuple[Response, str],
        *,
        history: Digest | None,
        policy_version: int,
        flags: MessageFlag = NO_FLAG,
    ) -> AgentCall:
        """Add a call and return it. ``new`` has the tokens and the text of the prompt after the parent's
        response, ``response`` the response and its text; ``history`` is the digest of all messages including
        the response."""
        (new_ids, new_text), (tokens, text) = new, response
        call = AgentCall(len(self.calls), parent, new_ids, new_text, tokens, text, policy_version, flags)
        self.calls.append(call)
        if parent is not None:
            parent.children.append(call)
        if history is not None:
            self.know(history, call)
        return call

    def know(self, history: Digest, call: AgentCall) -> None:
        """Let prompts with this history, too, continue ``call``."""
        self._by_history.setdefault(history, []).append(call)

    def longest(self, is_beginning: Callable[[AgentCall], bool]) -> AgentCall | None:
        """Return the call with the most tokens among the calls for which ``is_beginning`` holds, or None."""
        found = [call for call in self.calls if is_beginning(call)]
        return max(found, key=lambda call: call.num_tokens, default=None)

    def branches(self) -> list[list[Step]]:
        """Return the paths from roots to leaves, ordered by the first call that each path trains."""
        branches = []
        trained: set[int] = set()
        for leaf in (call for call in self.calls if not call.children):
            path = leaf.path()
            branches.append([Step(call, call.number not in trained) for call in path])
            trained |= {call.number for call in path}
        return sorted(branches, key=lambda path: next(step.call.number for step in path if step.trains))


def canonical(message: Mapping[str, Any]) -> str:
    """Return a text that is equal for two messages exactly when they count as the same.

    Clients add empty fields, reformat the arguments of tool calls, and change the ids of calls. They move
    thoughts to a field of their own, reword them, or leave them out. They strip texts, and drop a blank text
    beside a tool call. None of this changes the returned text.
    """
    calls = [
        (call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls") or ()
    ]
    role, content = message.get("role"), message.get("content") or ""
    text = without_thoughts(content) if role == "assistant" else content
    # ASCII: arguments of calls may have lone surrogates, which UTF-8 cannot encode.
    return json.dumps({"role": role, "content": text, "calls": calls}, sort_keys=True)


def without_thoughts(text: str) -> str:
    """Return what the assistant said without its thoughts, and without blanks around the rest.

    Templates may begin a thought themselves, so that the text has only the closing mark. A thought without a
    closing mark counts as text: clients drop at most its mark.
    """
    *ended, last = _ENDS_THOUGHT.split(text)
    parts = [_BEGINS_THOUGHT.split(part)[0] for part in ended if _BEGINS_THOUGHT.search(part)]
    parts.append(_BEGINS_THOUGHT.sub("", last))
    return "\n\n".join(part.strip() for part in parts if part.strip())


def histories(context: Any, messages: Sequence[Mapping[str, Any]]) -> list[Digest]:
    """Return the digest of each beginning of ``messages``, the shortest first; ``context`` has the chat
    template's other arguments, such as tools."""
    return list(_chained(no_history(context), messages))


def no_history(context: Any) -> Digest:
    """Return the digest of a history without messages."""
    text = json.dumps(context, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).digest()


def extended(history: Digest, message: Mapping[str, Any]) -> Digest:
    """Return the digest of a history after one more message."""
    return next(iter(_chained(history, [message])))


def _chained(digest: Digest, messages: Sequence[Mapping[str, Any]]) -> Iterator[Digest]:
    for message in messages:
        digest = hashlib.blake2b(digest + canonical(message).encode(), digest_size=16).digest()
        yield digest
