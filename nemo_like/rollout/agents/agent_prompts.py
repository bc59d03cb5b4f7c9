"""Turns messages into the tokens of a prompt, by the checkpoint's chat template, and tokens into text."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import Any

from nemo_like.data.messages import BadMessage, plain_call
from nemo_like.data.template_turns import TurnError, after_response, check_written
from nemo_like.data.tokenizer import Tokenizer
from nemo_like.rollout.agents.agent_request import BadRequest, PromptTooLong, objects
from nemo_like.rollout.agents.agent_session import AgentCall, without_thoughts


def plain_messages(messages: Any) -> list[dict[str, Any]]:
    """Return OpenAI's messages in the form that chat templates read: content as text, arguments of tool calls
    as mappings.

    Raises BadRequest when ``messages`` is not such a list, and for content other than text.
    """
    if not isinstance(messages, list) or not messages:
        raise BadRequest("messages must be a list that is not empty")
    return [_plain_message(message) for message in messages]


def _plain_message(message: Any) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequest(f"a message must be an object with a role, not {str(message)[:80]!r}")
    plain = {key: value for key, value in message.items() if value is not None}
    plain["role"] = "system" if message["role"] == "developer" else message["role"]
    plain["content"] = _text(message.get("content"))
    if calls := objects(message, "tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    else:
        plain.pop("tool_calls", None)
    return plain


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    try:
        plain = plain_call(call)
    except BadMessage as error:
        raise BadRequest(str(error)) from error
    if not isinstance(plain["function"]["name"], str):
        raise BadRequest(
            f"the name of a called function is {reprlib.repr(plain['function']['name'])}, not text"
        )
    return plain


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise BadRequest(f"content must be text or a list of parts, not {type(content).__name__}")
    texts = []
    for part in content:
        if isinstance(part, str):
            texts.append(part)
        elif isinstance(part, dict) and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif isinstance(part, dict) and isinstance(part.get("refusal"), str):
            texts.append(part["refusal"])
        else:
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise BadRequest(f"content of type {kind!r} is not served, only text is")
    return "\n".join(texts)


class AgentPrompts:
    """Renders the prompts of calls and decodes their responses, with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def check_arguments(self, given: Mapping[str, Any]) -> None:
        """Raise BadRequest for an argument in ``given`` that the chat template does not read.

        Arguments that the tokenizer or this package sets itself, such as another template, are refused too.
        """
        known = self.tokenizer.template_arguments if given else frozenset()
        if unread := sorted(given.keys() - known):
            raise BadRequest(
                f"chat_template_kwargs has {', '.join(map(repr, unread))}, which the checkpoint's chat "
                f"template does not take from a request; it takes {', '.join(sorted(known)) or 'none'}"
            )

    def check_length(self, messages: Sequence[Mapping[str, Any]], limit: int) -> None:
        """Raise PromptTooLong when the messages cannot fit in ``limit`` tokens, judged by their number and
        their characters.

        This spares rendering and encoding them. Thoughts do not count, because templates leave them out.
        """
        longest = self.tokenizer.longest_token
        num_tokens = max(len(messages), sum(len(one["content"]) for one in messages) // longest)
        if num_tokens > limit:
            said = (
                without_thoughts(one["content"]) if one["role"] == "assistant" else one["content"]
                for one in messages
            )
            num_tokens = max(len(messages), sum(map(len, said)) // longest)
        if num_tokens > limit:
            raise PromptTooLong(num_tokens, limit)

    def whole(self, messages: Sequence[Mapping[str, Any]], template: Mapping[str, Any]) -> str:
        """Return the text of a prompt, which ends as ``Tokenizer.render_prompt`` says; ``template`` has the
        chat template's further arguments, such as tools.

        Raises BadRequest when the chat template refuses the messages, or leaves out the text of one.
        """
        try:
            rendered = self.tokenizer.render_prompt(messages, **template)
            check_written(messages, rendered)
        except TurnError as error:
            raise BadRequest(f"the chat template {error}") from error
        except BadMessage as error:
            raise BadRequest(str(error)) from error
        return rendered

    def after(
        self,
        call: AgentCall,
        messages: Sequence[Mapping[str, Any]],
        num_known: int,
        template: Mapping[str, Any],
    ) -> str:
        """Return the part of a prompt's text that follows the response of ``call``, up to where the next
        response begins. The first ``num_known`` messages end with the response of ``call``.

        Raises BadRequest as ``whole`` does.
        """
        try:
            text = after_response(
                partial(self.tokenizer.render, **template), messages[:num_known], messages[num_known:]
            )
        except TurnError as error:
            raise BadRequest(f"the chat template {error}") from error
        return self.tokenizer.after_response(text, call.last_token_id)

    def encode_text_prompt(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a plain text prompt, with the special tokens that the tokenizer adds to a
        prompt."""
        return tuple(self.tokenizer.encode_prompt(text))

    def encode(self, text: str, before: int | None = None) -> tuple[int, ...]:
        """Return the tokens of a text that already contains its special tokens. ``before`` is the token that
        the text follows, if there is one."""
        try:
            text.encode()
        except UnicodeEncodeError as error:  # arguments of calls are JSON in JSON, which may spell such
            raise BadRequest(f"the messages have a text that is no Unicode: {error.reason}") from error
        if before is None:
            return tuple(self.tokenizer.encode_text(text))
        return tuple(self.tokenizer.encode_after(text, before))

    def text_of(
        self, token_ids: Sequence[int], stop_token_ids: Collection[int], stop_strings: Sequence[str]
    ) -> tuple[str, str | None]:
        """Decode a response. Return its text up to the stop token or stop string that ended it, and the stop
        string or None."""
        text = self.tokenizer.decode_response(token_ids, stop_token_ids)
        ends = [(place, stop) for stop in stop_strings if (place := text.find(stop)) >= 0]
        if not ends:
            return text, None
        place, stop = min(ends)
        return text[:place], stop
