"""Turns text into token ids and back, with the tokenizer of a Hugging Face checkpoint directory."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from nemo_like.data.chat_rendering import ChatRendering
from nemo_like.data.interface import Message, Prompt
from nemo_like.data.special_tokens import SpecialTokens

# Takes the place of a response where a conversation is rendered to see what the template puts after one.
_RESPONSE_MARK = "response-of-the-policy"


class UnreadablePrompt(ValueError):
    """A prompt cannot be given to the policy as it is: ``index`` is its place among the prompts."""

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index


class Tokenizer:
    """A checkpoint's tokenizer and chat template.

    ``eos_token_id`` ends a response; ``pad_token_id`` is the tokenizer's own, or eos where it has none.
    """

    def __init__(
        self, checkpoint: str | os.PathLike[str], chat_template: str | os.PathLike[str] | None = None
    ) -> None:
        """Load the tokenizer; ``chat_template`` is a Jinja file that replaces the tokenizer's own template.

        Raises ValueError when the directory has no tokenizer, or the tokenizer has no eos token; and as
        ``SpecialTokens.of`` does.
        """
        path = Path(checkpoint)
        if not (path / "tokenizer_config.json").is_file():
            raise ValueError(f"policy.model_name={str(path)!r} holds no tokenizer (tokenizer_config.json)")
        self._tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        if chat_template is not None:
            self._tokenizer.chat_template = Path(chat_template).read_text(encoding="utf-8")
        if self._tokenizer.eos_token_id is None:
            raise ValueError(f"the tokenizer in {str(path)!r} names no eos_token; responses could not end")
        self.eos_token_id: int = self._tokenizer.eos_token_id
        pad = self._tokenizer.pad_token_id
        self.pad_token_id: int = self.eos_token_id if pad is None else pad
        self._around = SpecialTokens.of(self._tokenizer)
        self._chat = ChatRendering(self._tokenizer, "data.chat_template")
        self._texts: dict[int, str] = {}  # of tokens that were asked for

    def __len__(self) -> int:
        """Return the number of token ids, the special ones included."""
        return len(self._tokenizer)

    def encode_prompt(self, prompt: Prompt, tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Return the token ids of a prompt, which a response continues, as ``encode_prompts`` does."""
        return self.encode_prompts([prompt], [tools])[0]

    def encode_prompts(
        self, prompts: Sequence[Prompt], tools: Sequence[Sequence[Mapping[str, Any]]]
    ) -> list[list[int]]:
        """Return the token ids of each prompt, which a response continues; all are encoded together.

        The chat template renders messages and the tools that the response may call, up to the beginning of
        the assistant's turn; where the prompt ends in a message of the assistant, up to the end of its
        content. A text prompt must describe tools itself; it gets the special tokens that the tokenizer puts
        before a text, unless it begins with them, and none after it. Raises UnreadablePrompt for messages
        when the tokenizer has no chat template, or as ``ChatRendering.checked_prompt`` does.
        """
        texts = []
        for index, (prompt, own) in enumerate(zip(prompts, tools, strict=True)):
            try:
                texts.append(prompt if isinstance(prompt, str) else self._rendered(prompt, own))
            except ValueError as error:
                raise UnreadablePrompt(index, str(error)) from error
        rows: list[list[int]] = self._tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        return [
            self._around.prompt(row) if isinstance(prompt, str) else row
            for prompt, row in zip(prompts, rows, strict=True)
        ]

    def _rendered(self, prompt: tuple[Message, ...], tools: Sequence[Mapping[str, Any]]) -> str:
        if self._tokenizer.chat_template is None:
            raise ValueError(
                "the prompt is a list of messages but the tokenizer has no chat template; "
                "use plain text prompts or a checkpoint of a chat model"
            )
        return self._chat.checked_prompt(prompt, tools)

    def encode_text(self, text: str) -> list[int]:
        """Return the token ids of a text by itself, without special tokens around it."""
        return self._tokenizer(text, add_special_tokens=False)["input_ids"]

    def token(self, token_id: int) -> str:
        """Return the text of one token, special ones included."""
        text: str = self._tokenizer.convert_ids_to_tokens(token_id)
        return text

    def token_texts(self, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token by itself, special ones included.

        Where a character takes several tokens, each of them shows as U+FFFD.
        """
        for token in set(token_ids) - self._texts.keys():
            text = self._tokenizer.decode([token], clean_up_tokenization_spaces=False)
            # A tokenizer of SentencePiece's kind leaves out the space at the beginning of a text.
            is_word = (self.token(token) or "").startswith("\u2581") and not text.startswith(" ")
            self._texts[token] = f" {text}" if is_word else text
        return [self._texts[token] for token in token_ids]

    def encode_observation(self, prompt: Prompt, text: str, role: str, last_token_id: int) -> list[int]:
        """Return the token ids between a response, which ends with ``last_token_id``, and the next response.

        In a conversation that began with a text prompt, they encode ``text`` alone. In one that began with
        messages, they encode what the chat template puts between two responses: ``text`` as a message of
        ``role`` with all around it. An eos with which the response ended is not repeated.
        """
        if not isinstance(prompt, str):
            text = self.after_response(self._between_responses(text, role), last_token_id)
        return self.encode_text(text)

    def after_response(self, text: str, last_token_id: int) -> str:
        """Return what a chat template puts after a response that ends with ``last_token_id``: ``text``
        without an eos with which the response ended already."""
        eos = self._tokenizer.eos_token
        is_ended = last_token_id == self.eos_token_id and text.startswith(eos)
        return text[len(eos) :] if is_ended else text

    def render(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> str:
        """Return what the chat template makes of messages; ``template`` are its further arguments. Raises
        what the template raises, ValueError when there is none."""
        return self._chat.render(messages, **template)

    def render_prompt(self, messages: Sequence[Mapping[str, Any]], **template: Any) -> str:
        """Return the text that a response to messages continues, as ``ChatRendering.render_prompt`` does."""
        return self._chat.render_prompt(messages, **template)

    @property
    def unread_fields(self) -> frozenset[str]:
        """What the chat template leaves out of prompts, as ``ChatRendering.unread_fields`` says."""
        return self._chat.unread_fields

    def for_server(self, text: str) -> str:
        """Return the text of a prompt as a server with this tokenizer wants it: without the special tokens
        before it, which the server adds."""
        return text.removeprefix(self._around.before_text)

    @property
    def hf_tokenizer(self) -> Any:
        """The tokenizer of transformers, for libraries that take one."""
        return self._tokenizer

    def _between_responses(self, text: str, role: str) -> str:
        messages = [
            {"role": "user", "content": "?"},
            {"role": "assistant", "content": _RESPONSE_MARK},
            {"role": role, "content": text},
        ]
        rendered = self._tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return rendered.partition(_RESPONSE_MARK)[2]

    def decode(self, token_ids: Iterable[int]) -> str:
        """Return the text of one response without its closing eos.

        Other special tokens stay visible, so that a stray one is not mistaken for a clean answer.
        """
        ids = [int(token) for token in token_ids]
        if ids and ids[-1] == self.eos_token_id:
            ids.pop()
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
