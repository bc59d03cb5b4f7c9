"""Turns messages into the tokens of a prompt, by the checkpoint's chat template, and tokens into text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nemo_like.data.messages import BadMessage, plain_call
from nemo_like.data.tokenizer import Tokenizer
from nemo_like.rollout.agent_session import AgentCall


class BadRequest(Exception):
    """A request that cannot be served; the message says why. ``code`` is OpenAI's name of the error."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request_error") -> None:
        super().__init__(message)
        self.status, self.code = status, code


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
    if calls := message.get("tool_calls"):
        try:
            plain["tool_calls"] = [plain_call(call) for call in calls]
        except BadMessage as error:
            raise BadRequest(str(error)) from error
    else:
        plain.pop("tool_calls", None)
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

    def whole(self, messages: Sequence[Mapping[str, Any]], template: Mapping[str, Any]) -> str:
        """Return the text of a prompt, which ends as ``Tokenizer.render_prompt`` says; ``template`` is what
        else the chat template gets, such as tools.

        Raises BadRequest where the chat template refuses it.
        """
        try:
            return self.tokenizer.render_prompt(messages, **template)
        except BadMessage as error:
            raise BadRequest(str(error)) from error

    def after(
        self,
        call: AgentCall,
        messages: Sequence[Mapping[str, Any]],
        num_known: int,
        template: Mapping[str, Any],
    ) -> str:
        """Return what follows the response of ``call`` in a prompt, whose first ``num_known`` messages end
        with that response, up to the beginning of the next one.

        A mark takes the response's place in the rendering, so that what templates do to earlier responses,
        such as leaving out thoughts, changes nothing. Raises BadRequest as ``whole`` does.
        """
        mark = "response-of-the-policy"
        said = {"role": "assistant", "content": mark}
        try:
            text = self.tokenizer.render(
                [*messages[: num_known - 1], said, *messages[num_known:]],
                add_generation_prompt=True,
                **template,
            )
        except Exception:
            # A template that wants calls of tools before their results: what the next messages add counts.
            rendered = self.whole(messages, template)
            before = self.tokenizer.render(messages[:num_known], add_generation_prompt=False, **template)
            alone = self.tokenizer.render(
                [{"role": "user", "content": "?"}, said], add_generation_prompt=False
            )
            if not rendered.startswith(before):
                raise BadRequest(
                    "the chat template writes earlier messages anew, and refuses others"
                ) from None
            text = mark + alone.rpartition(mark)[2] + rendered[len(before) :]
        return self.tokenizer.after_response(text.rpartition(mark)[2], int(call.response.token_ids[-1]))

    def encode_text_prompt(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a prompt that no template rendered, with the special tokens of a prompt."""
        return tuple(self.tokenizer.encode_prompt(text))

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the tokens of a text, which has its special tokens already."""
        return tuple(self.tokenizer.encode_text(text))

    def text_of(self, token_ids: Sequence[int], stop_strings: Sequence[str]) -> tuple[str, str | None]:
        """Return the text of a response without what ended it, the closing eos or a stop string, and that
        stop string."""
        text = self.tokenizer.decode(token_ids)
        ends = [(place, stop) for stop in stop_strings if (place := text.find(stop)) >= 0]
        if not ends:
            return text, None
        place, stop = min(ends)
        return text[:place], stop
