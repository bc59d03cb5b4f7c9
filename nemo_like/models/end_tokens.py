"""The tokens that end a response: the files of a checkpoint name them as ``eos_token_id``.

A chat model often has several: Llama 3.1 ends its turn with <|eot_id|>, a tool call with <|eom_id|> and a
text with <|end_of_text|>.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

_FILES = ("generation_config.json", "config.json")


class EndTokenError(ValueError):
    """A checkpoint's file has an ``eos_token_id`` that is neither an id nor a list of ids."""


def stated_end_ids(checkpoint: Path) -> tuple[int, ...]:
    """Return the ids that generation_config.json and config.json name as ``eos_token_id``, each once.

    A file that is missing or is not JSON names none. Raises EndTokenError for a value that is neither an id
    nor a list of ids.
    """
    return tuple(dict.fromkeys(token for name in _FILES for token in _ids(checkpoint / name)))


def shown_end_tokens(checkpoint: Path) -> list[str]:
    """Return the tokens that end a response as text for people, such as "<|im_end|> (151645)".

    The tokenizer's eos comes first, then ``stated_end_ids``. Without a tokenizer.json the files do not say
    the id of the tokenizer's eos, and words stand for it.
    """
    texts = _added_tokens(checkpoint)
    eos = _text(_content(checkpoint / "tokenizer_config.json").get("eos_token"))
    of_tokenizer = [token for token, text in texts.items() if text == eos]
    ids = dict.fromkeys((*of_tokenizer, *stated_end_ids(checkpoint)))
    shown = [f"{texts[token]} ({token})" if token in texts else f"{token}" for token in ids]
    return shown if of_tokenizer else ["the eos of the tokenizer", *shown]


def _ids(file: Path) -> Iterator[int]:
    content = _content(file)
    for part in (content, _mapping(content.get("text_config"))):
        value = part.get("eos_token_id")
        for token in value if isinstance(value, list) else [value] if value is not None else []:
            if not isinstance(token, int) or isinstance(token, bool) or token < 0:
                raise EndTokenError(
                    f"{file}: eos_token_id={json.dumps(value)} must be a token id or a list of them"
                )
            yield token


def _added_tokens(checkpoint: Path) -> dict[int, str]:
    added = _content(checkpoint / "tokenizer.json").get("added_tokens")
    tokens = map(_mapping, added if isinstance(added, list) else ())
    return {one["id"]: one["content"] for one in tokens if "id" in one and "content" in one}


def _text(token: Any) -> str | None:
    """Return the text of a token, which tokenizer_config.json has either plainly or in a mapping."""
    return token if isinstance(token, str) else _mapping(token).get("content")


def _content(file: Path) -> Mapping[str, Any]:
    try:
        return _mapping(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}
