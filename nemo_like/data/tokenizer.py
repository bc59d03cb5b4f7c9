"""Turns text into token ids and back, with the tokenizer of a Hugging Face checkpoint directory."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from transformers import AutoTokenizer

from nemo_like.data import template_turns
from nemo_like.data.chat_rendering import ChatRendering
from nemo_like.data.interface import Message, Prompt
from nemo_like.data.special_tokens import SpecialTokens
from nemo_like.models.end_tokens import stated_end_ids
from nemo_like.models.remote_code import loading_arguments


class UnreadablePrompt(ValueError):
    """A prompt cannot be given to the policy as it is; ``index`` is its position among the prompts."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index


class Tokenizer:
    """A checkpoint's tokenizer and chat template.

    ``end_token_ids`` end a response: the tokenizer's eos, and the ids that generation_config.json and
    config.json name. ``eos_token_id`` is the first of them; ``pad_token_id`` is the tokenizer's own, or eos
    when it has none.
    """

    def __init__(
        self, checkpoint: str | os.PathLike[str], chat_template: str | os.PathLike[str] | None = None
    ) -> None:
        """Load the tokenizer; ``chat_template`` is a Jinja file that replaces the tokenizer's own template.

        Raises ValueError when the directory has no tokenizer, or names no token that ends a response, and as
        ``SpecialTokens.of`` does.
        """
        path = Path(checkpoint)
        if not (path / "tokenizer_config.json").is_file():
            raise ValueError(f"policy.model_name={str(path)!r} holds no tokenizer (tokenizer_config.json)")
        self._tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True, **loading_arguments())
        if chat_template is not None:
            self._tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        own = [] if self._tokenizer.eos_token_id is None else [self._tokenizer.eos_token_id]
        self.end_token_ids: tuple[int, ...] = tuple(dict.fromkeys((*own, *stated_end_ids(path))))
        if not self.end_token_ids:
            raise ValueError(
                f"neither the tokenizer in {str(path)!r} nor generation_config.json or config.json there "
                "names an eos token; responses could not end"
            )
        self.eos_token_id = self.end_token_ids[0]
        pad = self._tokenizer.pad_token_id
        self.pad_token_id: int = self.eos_token_id if pad is None else pad
        self._around = SpecialTokens.of(self._tokenizer)
        self._chat = ChatRendering(self._tokenizer, "data.chat_template")
        self._texts: dict[int, str] = {}  # texts of tokens, by id, once they were asked for
        self._added: Mapping[int, Any] = dict(self._tokenizer.added_tokens_decoder)  # special ones and others
        self._ends: template_turns.TurnEnds | None = None  # once they were asked for
        self._checked_roles: set[str] = set()  # whose observations the chat template renders

    def __len__(self) -> int:
        """Return the number of token ids, the special ones included."""
        return len(self._tokenizer)

    @cached_property
    def num_ids(self) -> int:
        """The largest token id plus one; vocabularies may have gaps."""
        return max(self._tokenizer.get_vocab().values()) + 1

    @cached_property
    def longest_token(self) -> int:
        """The most characters that one token stands for."""
        return max(map(len, self._tokenizer.get_vocab()))

    def encode_prompt(self, prompt: Prompt, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Return the token ids of a prompt, which a response continues, as ``encode_prompts`` does."""
        return self.encode_prompts([prompt], [tools])[0]

    def encode_prompts(
        self,
        prompts: Sequence[Prompt],
        tools: Sequence[Sequence[Mapping[str, Any]]],
        templates: Sequence[Mapping[str, Any]] = (),
    ) -> list[list[int]]:
        """Return the token ids of each prompt, which a response continues; all are encoded together.

        The chat template renders messages, with its arguments in ``templates`` and the tools that the
        response may call, up to the beginning of the assistant's turn, or, when the prompt ends in a message
        of the assistant, up to the end of that message's content. A text prompt must describe tools itself;
        it gets the special tokens that the tokenizer puts before a text, unless it begins with them, and none
        after it. Raises UnreadablePrompt for messages when the tokenizer has no chat template, or as
        ``ChatRendering.checked_prompt`` does.
        """
        texts = []
        given = templates or [{}] * len(prompts)
        for index, (prompt, own, template) in enumerate(zip(prompts, tools, given, strict=True)):
            try:
                texts.append(
                    prompt if isinstance(prompt, str) else self.checked_prompt(prompt, own, template)
                )
            except ValueError as error:
                raise UnreadablePrompt(index, str(error)) from error
        rows: list[list[int]] = self._tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        return [
            self._around.prompt(row) if isinstance(prompt, str) else row
            for prompt, row in zip(prompts, rows, strict=True)
        ]

    def checked_prompt(
        self,
        prompt: tuple[Message, ...],
        tools: Sequence[Mapping[str, Any]],
        template: Mapping[str, Any] = MappingProxyType({}),
    ) -> str:
        """Return the text of a prompt of messages, as ``ChatRendering.checked_prompt`` does.

        Raises ValueError also when the tokenizer has no chat template.
        """
        if self._tokenizer.chat_template is None:
            raise ValueError(
                "the prompt is a list of messages, which data.*.use_chat_template=true makes of a text too, "
                "but the tokenizer has no chat template; set it to false for text prompts, name a template "
                "with data.chat_template, or use a checkpoint of a chat model"
            )
        return self._chat.checked_prompt(prompt, tools, template)

    @property
    def has_chat_template(self) -> bool:
        return self._tokenizer.chat_template is not None

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of a text, without special tokens around it."""
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    @property
    def added_tokens(self) -> Mapping[str, int]:
        """Token ids by text, of the tokens that the tokenizer never splits, such as special ones."""
        return {token.content: token_id for token_id, token in self._added.items()}

    def token(self, token_id: int) -> str:
        """Return the text of one token, special ones included."""
        text: str = self._tokenizer.convert_ids_to_tokens(token_id)
        return text

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token by itself, special ones included.

        Each token of a character that takes several tokens shows as U+FFFD.
        """
        for token in set(token_ids) - self._texts.keys():
            text = self._tokenizer.decode([token], clean_up_tokenization_spaces=False)
            # A tokenizer of SentencePiece's kind leaves out the space at the beginning of a text.
            is_word = (self.token(token) or "").startswith("\u2581") and not text.startswith(" ")
            self._texts[token] = f" {text}" if is_word else text
        return [self._texts[token] for token in token_ids]

    def encode_observation(
        self,
        prompt: Prompt,
        text: str,
        role: str,
        last_token_id: int,
        template: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """Return the token ids between a response, which ends with ``last_token_id``, and the next response.

        In a conversation that began with a text prompt, they encode ``text`` alone. In a conversation that
        began with messages, they encode the text that the chat template puts between two responses, which has
        ``text`` as a message of ``role``, rendered with the arguments in ``template``. A token with which the
        response ended is not repeated. Raises template_turns.TurnError when the template cannot render such a
        message.
        """
        if not isinstance(prompt, str):
            if role not in self._checked_roles:
                template_turns.check_role(self.render, role)
                self._checked_roles.add(role)
            render = partial(self.render, **template)
            between = template_turns.between_responses(render, text, role)
            text = self.after_response(between, last_token_id)
            last_token_id = self.written_end(last_token_id)
        return self.encode_after(text, last_token_id)

    def encode_after(self, text: str, last_token_id: int) -> list[int]:
        """Return the token ids of a text that follows the token ``last_token_id``. They may differ from the
        ids of the text alone: some tokens absorb the spaces after them, and some tokenizers put a space at
        the beginning of a text."""
        token = self._added.get(last_token_id)
        if token is None:
            # A text merges with no token before it, so a token that absorbs no spaces can stand for it.
            last_token_id, token = self.eos_token_id, self._added.get(self.eos_token_id)
            if token is None or token.rstrip:
                return self.encode_text(text)
        ids = self.encode_text(f"{token.content}{text}")
        return ids[1:] if ids[:1] == [last_token_id] else self.encode_text(text)

    def after_response(self, text: str, last_token_id: int) -> str:
        """Return ``text``, which a chat template puts after a response that ends with ``last_token_id``,
        without the end of the response's turn, if the response already has an end, even by another token."""
        if last_token_id not in self.end_token_ids:
            return text
        return template_turns.without_end(text, self.token(last_token_id), self._turn_ends())

    def written_end(self, last_token_id: int) -> int:
        """Return the token with which the chat template ends a turn, if the response ends with any token that
        ends one; else ``last_token_id``. The text after the response is encoded as it is after the returned
        token."""
        if last_token_id not in self.end_token_ids:
            return last_token_id
        written = self._turn_ends().written
        places = {written.find(self.token(end)): end for end in self.end_token_ids}
        places.pop(-1, None)  # tokens that the template does not write
        return places[min(places)] if places else last_token_id

    def _turn_ends(self) -> template_turns.TurnEnds:
        if self._ends is None:
            self._ends = template_turns.TurnEnds(
                template_turns.turn_end(self.render),
                [self.token(end) for end in self.end_token_ids],
                [token.content for token in self._added.values() if token.special],
            )
        return self._ends

    def render(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> str:
        """Return the text that the chat template makes of messages; ``template`` has its further arguments.
        Raises the errors of the template, and ValueError when there is none."""
        return self._chat.render(messages, **template)

    def render_prompt(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> str:
        """Return the text that a response to messages continues, as ``ChatRendering.render_prompt`` does."""
        return self._chat.render_prompt(messages, **template)

    @property
    def template_arguments(self) -> frozenset[str]:
        """The further arguments that the chat template reads, as in ``ChatRendering.arguments``."""
        return self._chat.arguments

    @property
    def unread_fields(self) -> frozenset[str]:
        """The parts of prompts that the chat template leaves out, as in ``ChatRendering.unread_fields``."""
        return self._chat.unread_fields

    def for_server(self, text: str) -> str:
        """Return the text of a prompt without the special tokens before it, which a server with this
        tokenizer adds itself."""
        return text.removeprefix(self._around.before_text)

    @property
    def hf_tokenizer(self) -> Any:
        """The tokenizer of transformers, for libraries that take one."""
        return self._tokenizer

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of tokens, special ones included."""
        ids = [int(token) for token in token_ids]
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def decode_response(self, token_ids: Iterable[int], stop_token_ids: Collection[int]) -> str:
        """Return the text of one response, without the last token if that is one of ``stop_token_ids``.

        Other special tokens stay visible, so that a stray one is not mistaken for a clean answer.
        """
        ids = [*token_ids]
        return self.decode(ids[:-1] if ids and ids[-1] in stop_token_ids else ids)
