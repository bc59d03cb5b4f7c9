"""Digests of the contents of data sources, by which a continued run notices other data.

A digest covers the prompts, answers, further fields and images in their order. It does not cover paths, times
and kinds of files, or the text that the configuration puts around a prompt.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields
from datetime import date, time, timedelta
from decimal import Decimal
from hashlib import blake2b
from pathlib import Path
from typing import Any

from nemo_like.data.images import Picture
from nemo_like.data.interface import Message, PromptDataset, TaskPrompt

_DIGEST_BYTES = 16
# Of an image, this much of both ends is read: all bytes of a million images would take many minutes.
_IMAGE_END_BYTES = 4096

Contents = Callable[[TaskPrompt], object]


def record_contents(task_prompt: TaskPrompt) -> object:
    """Return everything that a record contains, its further fields included."""
    return [task_prompt.prompt, task_prompt.answer, _sorted(task_prompt.data), task_prompt.images]


def made_contents(task_prompt: TaskPrompt) -> object:
    """Return the prompt and the answer that a program made. Further fields are left out, since a program may
    order them differently each time."""
    return [task_prompt.prompt, task_prompt.answer]


class DigestedDataset:
    """A dataset that computes its digest during the first pass over it, so that no record is read twice."""

    def __init__(self, prompts: PromptDataset, contents: Contents) -> None:
        """Digest ``contents`` of each prompt."""
        self._prompts, self._contents = prompts, contents
        self._hash = blake2b(digest_size=_DIGEST_BYTES)
        self._num_digested = 0

    def __len__(self) -> int:
        return len(self._prompts)

    def __getitem__(self, index: int) -> TaskPrompt:
        """Return prompt ``index``. Raises the errors of the wrapped dataset."""
        task_prompt = self._prompts[index]
        if index == self._num_digested:
            self._hash.update(_encoded(self._contents(task_prompt)))
            self._num_digested += 1
        return task_prompt

    def digest(self) -> str:
        """Return the digest of all prompts, in hexadecimal; read the prompts that have not been read yet."""
        for index in range(self._num_digested, len(self)):
            self[index]
        return self._hash.hexdigest()


def digest_of(settings: object) -> str:
    """Return the digest of the settings of a source that generates its prompts: equal settings make equal
    prompts, so the digest stands for their contents."""
    return blake2b(_encoded(_sorted(settings)), digest_size=_DIGEST_BYTES).hexdigest()


def _encoded(contents: object) -> bytes:
    """Return contents as a line of JSON, so that different sequences of contents never look alike."""
    text = json.dumps(contents, ensure_ascii=False, separators=(",", ":"), default=_plain)
    return text.encode("utf-8", "surrogatepass") + b"\n"


def _sorted(value: Any) -> Any:
    """Return plain data with the keys of every mapping as text and in order, since fields have no order, and
    without None: a table has every field in every row, a line of JSON only the fields with a value."""
    if isinstance(value, Mapping):
        return {str(key): _sorted(value[key]) for key in sorted(value, key=str) if value[key] is not None}
    if isinstance(value, list | tuple):
        return [_sorted(one) for one in value]
    return value


def _plain(value: object) -> object:
    """Return a JSON value for a value that JSON lacks. For an unknown type it is only the type's name, since
    the text of an object may contain its address."""
    match value:
        case Mapping():
            return _sorted(value)
        case Message():
            # A field that says nothing is left out, so that fields to come change no digest.
            named = {field.name: getattr(value, field.name) for field in fields(value)}
            return {name: _sorted(one) for name, one in named.items() if one not in (None, "", (), [], {})}
        case Picture():
            return _of_picture(value)
        case bytes():
            return blake2b(value, digest_size=_DIGEST_BYTES).hexdigest()
        case date() | time() | timedelta() | Decimal():
            return str(value)
        case _:
            return type(value).__qualname__


def _of_picture(picture: Picture) -> object:
    """Return the number of bytes of an image's file, and the digests of both ends.

    A file that cannot be read counts as empty here; using the image reports the error.
    """
    if isinstance(picture.source, bytes):
        size = len(picture.source)
        ends = picture.source[:_IMAGE_END_BYTES], picture.source[max(0, size - _IMAGE_END_BYTES) :]
    else:
        try:
            with Path(picture.source).open("rb") as file:
                first, size = file.read(_IMAGE_END_BYTES), file.seek(0, 2)
                file.seek(max(0, size - _IMAGE_END_BYTES))
                ends = first, file.read()
        except OSError:
            size, ends = 0, (b"", b"")
    return [size, *(blake2b(end, digest_size=_DIGEST_BYTES).hexdigest() for end in ends)]
