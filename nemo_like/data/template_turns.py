"""Finds the text that a chat template writes between two responses, by rendering made-up conversations. Pure.

    user ──▶ [a mark in place of the response] ──▶ observation ──▶ beginning of the next response
                                                └─────────── between ───────────┘

Chat templates differ in the text that they refuse, leave out, move or write twice, so nothing is taken
for granted here: a mark must be there once, and so must the words of every observation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import Any, Protocol

# Takes the place of a response where a conversation is rendered to see what the template writes after one.
_MARK = "response-of-the-policy"
# The id of a made-up call. Templates of Mistral want nine letters or digits.
MADE_UP_CALL_ID = "call00001"
_CALLED = "function-of-a-made-up-call"
_QUESTION: Mapping[str, Any] = {"role": "user", "content": "?"}
# Roles that templates know for messages to the policy.
_ROLES = ("user", "tool", "system")
MADE_UP_TEXT = "quokka"  # a message of a made-up conversation: a word that no template writes by itself
_WORDS = re.compile(r"[A-Za-z0-9]+")


class TurnError(ValueError):
    """A chat template cannot render a turn of a conversation as needed; the message says why."""


class Render(Protocol):
    """Renders messages by a chat template; raises whatever the template raises."""

    def __call__(
        self, messages: Sequence[Mapping[str, Any]], *, add_generation_prompt: bool, **template: Any
    ) -> str: ...


def unused_mark(*texts: str) -> str:
    """Return a word that is in none of the texts, to stand for a response."""
    mark = _MARK
    while any(mark in text for text in texts):
        mark += "-"
    return mark


def after_mark(rendered: str, mark: str) -> str:
    """Return the text that a template wrote after the mark of a response.

    Raises TurnError unless the mark occurs exactly once.
    """
    count = rendered.count(mark)
    if count == 1:
        return rendered.partition(mark)[2]
    how = "leaves out the text of a response" if not count else f"writes the text of a response {count} times"
    raise TurnError(f"{how}, so that nobody can tell what follows it")


def is_written(text: str, rendered: str) -> bool:
    """Return whether a template wrote the text: all its words are there, in order.

    Templates strip texts, and some write them as JSON, which changes no word of ASCII letters and digits. A
    text without such words must be there unchanged, or as JSON.
    """
    words = _WORDS.findall(text)
    if not words:
        return text.strip() in rendered or json.dumps(text, ensure_ascii=False)[1:-1] in rendered
    place = 0
    for word in words:
        found = rendered.find(word, place)
        if found < 0:
            return False
        place = found + len(word)
    return True


def between_responses(render: Render, text: str, role: str) -> str:
    """Return the text that the template writes between a response and the next: the end of the response's
    turn, ``text`` as a message of ``role``, and the beginning of the next turn.

    For a template that refuses a result without a call, a made-up call precedes it, and the returned text
    contains the id of that call. Raises TurnError when the template has no such rendering.
    """
    observed = {"role": role, "content": text}
    return _first_good(
        [observed],
        partial(_after_mark, render, [_QUESTION], [observed]),
        partial(_after_made_up_call, render, observed),
    )


def after_response(
    render: Render, known: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]
) -> str:
    """Return the text that the template writes for the messages ``new`` after the response with which
    ``known`` ends, beginning with the end of the response's turn.

    Changes that the template makes to earlier messages, such as leaving out thoughts, do not matter. Raises
    TurnError when it refuses the messages or leaves out the text of one.
    """
    return _first_good(
        new,
        partial(_after_mark, render, known[:-1], new),
        # A template may refuse earlier messages, which are in the tokens already ...
        partial(_after_mark, render, [_QUESTION], new),
        # ... or results of a response that calls no tool.
        partial(_after_message, render, known[-1], new),
    )


def check_written(messages: Sequence[Mapping[str, Any]], rendered: str) -> None:
    """Raise TurnError when a rendering leaves out the text of a message. Messages of the assistant are not
    checked: many templates leave out earlier thoughts."""
    for message in messages:
        if message["role"] != "assistant" and not is_written(message.get("content") or "", rendered):
            raise TurnError(f"leaves out the text of a message of the role {message['role']}")


def _first_good(messages: Sequence[Mapping[str, Any]], *ways: Callable[[], str]) -> str:
    """Return the first rendering that has the text of all messages. Raises TurnError, with the first reason,
    when none has."""
    reasons = []
    for way in ways:
        try:
            rendered = way()
            check_written(messages, rendered)
            return rendered
        except TurnError as error:
            reasons.append(error)
    raise reasons[0]


def check_role(render: Render, role: str) -> None:
    """Raise TurnError, which names the roles that work, when the template cannot render an observation of
    ``role``."""
    try:
        between_responses(render, MADE_UP_TEXT, role)
    except TurnError as error:
        known = " and ".join(rendered_roles(render)) or "no usual role"
        raise TurnError(f"{error}; it renders observations of the role {known}") from error


def rendered_roles(render: Render) -> list[str]:
    """Return which of the usual roles an observation may have with this template."""
    found = []
    for role in _ROLES:
        with suppress(TurnError):
            between_responses(render, MADE_UP_TEXT, role)
            found.append(role)
    return found


def _after_mark(render: Render, before: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> str:
    """Return the text after a response of plain text."""
    mark = unused_mark(*(str(message.get("content")) for message in (*before, *new)))
    said = {"role": "assistant", "content": mark}
    return after_mark(_rendered(render, [*before, said, *new], goes_on=True), mark)


def _after_message(render: Render, response: Mapping[str, Any], new: Sequence[Mapping[str, Any]]) -> str:
    """Return the text that ``new`` adds to a conversation that ends with a response, after the end of a
    turn."""
    known = [_QUESTION, response]
    before = _rendered(render, known, goes_on=False)
    whole = _rendered(render, [*known, *new], goes_on=True)
    if not whole.startswith(before):
        raise TurnError("writes earlier messages anew when others follow")
    return _after_last(render) + whole[len(before) :]


def _after_made_up_call(render: Render, observed: Mapping[str, Any]) -> str:
    """Return the text after a response that calls a function of an unknown name."""
    function = {"name": _CALLED, "arguments": {}}
    call = {"id": MADE_UP_CALL_ID, "type": "function", "function": function}
    calling = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {**observed, "tool_call_id": MADE_UP_CALL_ID, "name": _CALLED}
    added = _after_message(render, calling, [result])
    if _CALLED in added:
        raise TurnError(
            "writes the name of the function that was called, which only an agent's messages have"
        )
    return added


def turn_end(render: Render) -> str:
    """Return a text that contains the token which the template writes after every response; a text without
    such a token when the template writes none.

    It is the text after the last message. When that is blank, it is the common beginning of all messages that
    may follow. Raises TurnError as ``after_mark`` does, and when the template raises.
    """
    after_last = _after_last(render)
    if after_last.strip():
        return after_last
    followed = []
    for role in _ROLES:
        with suppress(TurnError):
            observed = {"role": role, "content": MADE_UP_TEXT}
            followed.append(_after_mark(render, [_QUESTION], [observed]))
    return _shared(followed) if len(followed) > 1 else ""


def _after_last(render: Render) -> str:
    mark = unused_mark()
    said = [_QUESTION, {"role": "assistant", "content": mark}]
    return after_mark(_rendered(render, said, goes_on=False), mark)


@dataclass(frozen=True, slots=True)
class TurnEnds:
    """The tokens with which a checkpoint ends turns, as texts."""

    written: str  # the result of ``turn_end``
    tokens: Collection[str]  # tokens that end a response
    special: Collection[str]  # all special tokens


def without_end(text: str, ended_by: str, ends: TurnEnds) -> str:
    """Return ``text``, which a template writes after a response, without the end of the turn, since the
    response already ends with the token ``ended_by``.

    A template may end the last turn with one special token and earlier turns with another, which is left out
    too. When a template ends no turn, responses end with the header of the next message, which must occur
    only once.
    """
    written = _shared([ends.written, text])
    places = {end: written.index(end) + len(end) for end in ends.tokens if end in written}
    if places:
        return text[places.get(ended_by, min(places.values())) :]
    if any(ends.written.lstrip().startswith(end) for end in ends.tokens):
        first = max((one for one in ends.special if text.startswith(one)), key=len, default="")
        return text[len(first) :]
    return text.removeprefix(ended_by)


def _shared(texts: Sequence[str]) -> str:
    """Return the common beginning of all texts."""
    columns = zip(*texts, strict=False)
    return "".join(column[0] for column in takewhile(lambda column: len(set(column)) == 1, columns))


def _rendered(render: Render, messages: Sequence[Mapping[str, Any]], *, goes_on: bool) -> str:
    """Return the rendering. Raises TurnError when the template raises anything."""
    try:
        return render(messages, add_generation_prompt=goes_on)
    except Exception as error:
        roles = ", ".join(message["role"] for message in messages)
        raise TurnError(f"refuses a conversation of {roles} ({type(error).__name__}: {error})") from error
