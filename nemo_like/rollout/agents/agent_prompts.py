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
    """Return OpenAI's messages as chat templates read them: content as text, arguments of calls as mappings.

    Raises BadRequest for anything that is no such list, and for content other than text.
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
    """Renders prompts and reads responses with one tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def check_arguments(self, given: Mapping[str, Any]) -> None:
        """Raise BadRequest where a request brings the chat template an argument that it does not read.

        What the tokenizer and this package themselves give it, such as another template, is none of these.
        """
        known = self.tokenizer.template_arguments if given else frozenset()
        if unread := sorted(given.keys() - known):
            raise BadRequest(
                f"chat_template_kwargs has {', '.join(map(repr, unread))}, which the checkpoint's chat "
                f"template does not take from a request; it takes {', '.join(sorted(known)) or 'none'}"
            )

    def check_length(self, messages: Sequence[Mapping[str, Any]], limit: int) -> None:
        """Raise PromptTooLong where there are more messages than ``limit`` tokens, or more characters than so
        many tokens can stand for.

        Nobody then renders and encodes them to find that out. Thoughts do not count: templates leave them
        out.
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
        """Return the text of a prompt, which ends as ``Tokenizer.render_prompt`` says; ``template`` is what
        else the chat template gets, such as tools.

        Raises BadRequest where the chat template refuses it, or leaves out the text of a message.
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
        """Return what follows the response of ``call`` in a prompt, whose first ``num_known`` messages end
        with that response, up to the beginning of the next one.

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
        """Return the tokens of a prompt that no template rendered, with the special tokens of a prompt."""
        return tuple(self.tokenizer.encode_prompt(text))

    def encode(self, text: str, before: int | None = None) -> tuple[int, ...]:
        """Return the tokens of a text, which has its special tokens already; it follows the token ``before``,
        where there is one."""
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
        """Return the text of a response without what ended it, a stop token or a stop string, and that stop
        string."""
        text = self.tokenizer.decode_response(token_ids, stop_token_ids)
        ends = [(place, stop) for stop in stop_strings if (place := text.find(stop)) >= 0]
        if not ends:
            return text, None
        place, stop = min(ends)
        return text[:place], stop
