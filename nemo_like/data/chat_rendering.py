"""Renders messages by a tokenizer's chat template, and finds out which parts of them the template leaves
out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise, product
from types import MappingProxyType
from typing import Any

from jinja2 import Environment, nodes
from jinja2.ext import Extension
from jinja2.meta import find_undeclared_variables
from jinja2.parser import Parser

from nemo_like.data.interface import Message
from nemo_like.data.messages import BadMessage, plain_call, with_text_arguments
from nemo_like.data.template_turns import MADE_UP_CALL_ID

_END_OF_REASONING = "</think>"
# Fields without which the policy would get another question.
_NEEDED = ("content", "tool_calls")
# Fields that only tie messages together, and that templates leave out.
_IDS = ("tool_call_id",)
# A conversation with a call that no record has, by which a template shows how it reads calls.
_NAME, _ARGUMENTS, _TEXT = "made_up_tool", {"made_up_argument": "made-up-value"}, "made-up text"
_MADE_UP: tuple[dict[str, Any], ...] = (
    {"role": "user", "content": "?"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": MADE_UP_CALL_ID, "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}
        ],
    },
    {"role": "tool", "tool_call_id": MADE_UP_CALL_ID, "name": _NAME, "content": "!"},
)


class _Generation(Extension):
    """The Jinja tag with which templates mark the assistant's text, and which transformers knows."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


# The functions that transformers gives every template, besides Jinja's own.
_FUNCTIONS = ("raise_exception", "strftime_now")
_JINJA = Environment(extensions=[_Generation, "jinja2.ext.loopcontrols"])

_Render = Callable[[Sequence[Mapping[str, Any]]], str]


@contextmanager
def _refusals() -> Iterator[None]:
    """Turn any error of a template into BadMessage."""
    try:
        yield
    except Exception as error:
        raise BadMessage(f"the chat template refuses the messages: {error}") from error


@dataclass(frozen=True, slots=True)
class CallForm:
    """The form in which a chat template wants a message that calls tools."""

    arguments_are_text: bool = False  # otherwise they are a mapping
    no_content_is_null: bool = False  # otherwise it is empty text

    def of(self, message: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a message in this form. Raises BadMessage for calls that are not in OpenAI's form."""
        if not message.get("tool_calls"):
            return message
        calls = [plain_call(call) for call in message["tool_calls"]]
        if self.arguments_are_text:
            calls = [with_text_arguments(call) for call in calls]
        content = message["content"] or (None if self.no_content_is_null else "")
        return {**message, "content": content, "tool_calls": calls}


class ChatRendering:
    """A tokenizer's chat template, and which fields of messages it reads."""

    def __init__(self, tokenizer: Any, place: str) -> None:
        """Render with a tokenizer of transformers; ``place`` is the setting, named in errors, that replaces
        the template."""
        self._tokenizer, self._place = tokenizer, place
        self._unread: dict[Hashable, frozenset[str]] = {}  # by kind of message: fields that are left out

    @property
    def unread_fields(self) -> frozenset[str]:
        """The parts of checked prompts that the template leaves out: fields of messages, and ``tools``."""
        return frozenset().union(*self._unread.values())

    @cached_property
    def arguments(self) -> frozenset[str]:
        """The further arguments that a conversation may bring: variables that the template reads and that
        neither Jinja, transformers nor this class sets."""
        tokens = {*self._tokenizer.special_tokens_map, *self._tokenizer.SPECIAL_TOKENS_ATTRIBUTES}
        own = {"messages", *_FUNCTIONS, *_JINJA.globals, *tokens}
        own |= inspect.signature(self._tokenizer.apply_chat_template).parameters.keys()
        templates = self._tokenizer.chat_template or ""
        read: set[str] = set()
        for template in templates.values() if isinstance(templates, dict) else (templates,):
            read |= find_undeclared_variables(_JINJA.parse(template))
        return frozenset(read - own)

    def render(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> str:
        """Return the text that the template makes of messages; ``template`` has its further arguments. Raises
        the errors of the template, and ValueError when there is none."""
        return self._rendered([self._form.of(message) for message in messages], **template)

    def render_prompt(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> str:
        """Return the text that a response to messages continues. It ends with the beginning of the
        assistant's turn, or, when the last message is the assistant's, with that message's content.

        Raises BadMessage, with the template's reason, when it refuses the messages.
        """
        is_begun = messages[-1]["role"] == "assistant"
        if is_begun and messages[-1].get("tool_calls"):
            raise BadMessage("the last message calls a tool, and its result is missing")
        with _refusals():
            return self.render(
                messages, add_generation_prompt=not is_begun, continue_final_message=is_begun, **template
            )

    def checked_prompt(
        self,
        prompt: Sequence[Message],
        tools: Sequence[Mapping[str, Any]],
        template: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Return the text that a response to a prompt continues, as ``render_prompt`` does; ``template`` has
        the template's further arguments.

        Raises BadMessage also when the template leaves out the content of a message or a tool call. Each kind
        of message is checked once: kinds differ in role, fields and neighbours.
        """
        render = partial(self.render_prompt, tools=[*tools] or None, **template)
        text = self._checked(prompt, render, bool(tools))
        if tools and "tools" not in self._unread:
            is_same = self.render_prompt([message.as_mapping() for message in prompt], **template) == text
            self._unread["tools"] = frozenset({"tools"} if is_same else ())
        return text

    def checked_conversation(self, messages: Sequence[Message]) -> str:
        """Return the text of a complete conversation, checked as ``checked_prompt`` does."""
        return self._checked(messages, self._render_whole, False)

    def _render_whole(self, messages: Sequence[Mapping[str, Any]]) -> str:
        with _refusals():
            return self.render(messages)

    def _checked(self, conversation: Sequence[Message], render: _Render, has_tools: bool) -> str:
        messages = [message.as_mapping() for message in conversation]
        rendered = render(messages)
        for place, kind in enumerate(_kinds(messages)):
            if (known := (kind, has_tools)) not in self._unread:
                self._unread[known] = self._left_out(messages, place, rendered, render)
        return rendered

    def _left_out(
        self, messages: Sequence[dict[str, Any]], place: int, rendered: str, render: _Render
    ) -> frozenset[str]:
        """Return the fields of the message at ``place`` that can be removed without changing the rendering.

        Raises BadMessage when its content or a tool call is among them.
        """
        unread = set()
        message = messages[place]
        for what, field, variant in _variants(message):
            try:
                other = render([*messages[:place], variant, *messages[place + 1 :]])
            except BadMessage:  # the template misses what was left out
                continue
            if other != rendered:
                continue
            if field in _NEEDED:
                raise BadMessage(
                    f"the chat template leaves out {what} of message {place + 1} (role {message['role']!r}), "
                    f"which would never be read; name a template that writes it in {self._place}, or take "
                    "it out of the prompt"
                )
            unread.add(field)
        return frozenset(unread)

    @cached_property
    def _form(self) -> CallForm:
        """The form of tool calls with which the template writes a made-up call completely; the usual form
        when none works."""
        for arguments_are_text, no_content_is_null in product((False, True), repeat=2):
            form = CallForm(arguments_are_text, no_content_is_null)
            try:
                text = self._rendered([form.of(message) for message in _MADE_UP])
            except Exception:  # whatever a template raises
                continue
            # A template that expects text writes a mapping as Python does, with other quotes.
            is_whole = _NAME in text and all(value in text for value in _ARGUMENTS.values())
            if is_whole and repr(_ARGUMENTS) not in text:
                return form
        return CallForm()

    def _rendered(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> str:
        text: str = self._tokenizer.apply_chat_template(list(messages), tokenize=False, **template)
        return text


def _kinds(messages: Sequence[Mapping[str, Any]]) -> Iterator[Hashable]:
    """Yield, for each message, the facts that decide whether a template reads it: role, fields, calls and
    neighbours."""
    roles = [None, *(message["role"] for message in messages), None]
    around = pairwise(roles[:-1]), roles[2:]
    for message, (before, role), after in zip(messages, *around, strict=True):
        has_text = bool(_needed_text(message).strip())
        yield before, role, after, has_text, tuple(sorted(message)), len(message.get("tool_calls", ()))


def _needed_text(message: Mapping[str, Any]) -> str:
    """Return the content of a message without the assistant's reasoning, which templates rightly leave out of
    earlier turns."""
    content: str = message["content"]
    return content.rpartition(_END_OF_REASONING)[2] if message["role"] == "assistant" else content


def _variants(message: Mapping[str, Any]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield changes of a message, each as: the changed part in words, its field, and the changed message."""
    if (said := _needed_text(message)).strip():
        # Another text, since templates may fail at none.
        changed_text = f"{message['content'].removesuffix(said)}{_TEXT}"
        yield "the content", "content", {**message, "content": changed_text}
    calls = message.get("tool_calls", ())
    for number, call in enumerate(map(plain_call, calls)):
        function, what = call["function"], f"the call of {call['function']['name']!r}"
        for other in ({"name": _NAME}, {"arguments": {**function["arguments"], **_ARGUMENTS}}):
            changed = [*calls]
            changed[number] = {**call, "function": {**function, **other}}
            yield what, "tool_calls", {**message, "tool_calls": changed}
    for field in message.keys() - {"role", "content", "tool_calls", *_IDS}:
        yield field, field, {key: value for key, value in message.items() if key != field}
