"""Datasets of records: from a file of JSON lines, or loaded by ``data.loading``."""

from __future__ import annotations

import codecs
import json
import os
import re
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from nemo_like.data.answers import answer_text
from nemo_like.data.image_marks import with_marks, with_parts_as_marks
from nemo_like.data.images import Picture, pictures_of
from nemo_like.data.interface import Message, Prompt, TaskPrompt
from nemo_like.data.messages import BadMessage, conversation_of, without_missing_arguments
from nemo_like.data.nested_fields import NoField, holder_of
from nemo_like.data.options import DatasetConfig
from nemo_like.data.source_kind import source_kind_of
from nemo_like.data.splits import chosen_rows, is_name, only_name

# JSON's escape for one half of a character beyond U+FFFF.
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")


class RecordDataset:
    """Prompts made from records: a sequence of mappings, each with a prompt and an answer."""

    def __init__(
        self, records: Sequence[Mapping[str, Any]], fields: RecordFields, where: Callable[[int], str]
    ) -> None:
        """Keep the records. ``where(index)`` returns a record's origin, such as file and line, for errors."""
        self._records, self._fields, self._where = records, fields, where

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> TaskPrompt:
        """Return the prompt of record ``index``. Raises IndexError outside 0 .. len - 1, ValueError for a bad
        field."""
        if not 0 <= index < len(self):
            raise IndexError(f"no problem {index} among {len(self)}")
        return self._fields.task_prompt(self._records[index], self._where(index))


def checked_dataset(dataset: RecordDataset, cfg: DatasetConfig) -> RecordDataset:
    """Return the dataset of a source once its first record has been checked.

    Raises ValueError when there are no records, or when the first lacks a field, so that a wrong prompt_key
    or answer_key is noticed now and not in a step.
    """
    if not len(dataset):
        raise ValueError(f"{cfg.path} holds no problems")
    dataset[0]
    return dataset


@dataclass(frozen=True, slots=True)
class RecordFields:
    """The names of the fields that hold the prompt and the reference answer.

    A dot in such a name leads into a mapping, which then stays in ``data`` whole.

    The prompt is text, or a list of ``{"role": ..., "content": ...}`` messages, whose content is text or,
    with images, a list of parts; all further fields of a message are kept. All other fields of a record,
    except its images, become the ``data`` of the prompt; fields named in ``columns`` also become its
    ``columns``.
    """

    prompt: str  # data.*.prompt_key
    answer: str  # data.*.answer_key
    columns: Collection[str] = ()  # keys of data.*.columns
    images: str | None = None  # data.*.images_key
    directory: str | None = None  # where paths of images begin
    is_table: bool = False  # records are rows of an Arrow table

    @classmethod
    def of(cls, cfg: DatasetConfig) -> Self:
        """Return the names that a source configures; relative paths of images begin at its file's
        directory."""
        path = Path(cfg.path or "")
        directory = str(path if path.is_dir() else path.parent)
        is_table = source_kind_of(cfg).is_table
        return cls(cfg.prompt_key, cfg.answer_key, tuple(cfg.columns), cfg.images_key, directory, is_table)

    def task_prompt(self, record: Mapping[str, Any], where: str) -> TaskPrompt:
        """Return the prompt and all other contents of a record, with its answer as ``answer_text`` gives it.

        Raises ValueError, whose text begins with ``where``, when a field is missing, the prompt is empty or
        neither text nor messages, the answer is a list or a mapping, or an image is invalid or has no place
        in the prompt.
        """
        given = _field(record, self.prompt, "prompt_key", where)
        images: tuple[Picture, ...] = ()
        if self.images is not None:
            images = pictures_of(record.get(self.images), self.directory, where)
            given, images = with_parts_as_marks(given, images, self.directory, where)
        prompt = self._prompt(given, where)
        if self.images is not None:
            prompt = with_marks(prompt, len(images), where)
        answer = _field(record, self.answer, "answer_key", where)
        rest = {key: value for key, value in record.items() if key not in self._own_fields}
        columns = {name: _field(record, name, "columns", where) for name in self.columns}
        text = answer_text(answer, f"{where}, field {self.answer!r}")
        return TaskPrompt(prompt, text, rest, columns=columns, images=images, where=where)

    @property
    def _own_fields(self) -> tuple[str | None, ...]:
        """The fields that do not become ``data`` for the environment."""
        return (self.prompt, self.answer, self.images)

    def _prompt(self, value: Any, where: str) -> Prompt:
        if isinstance(value, str):
            prompt: Prompt = value
            texts = [value]
        else:
            prompt = self._messages(value, where)
            texts = [message.content for message in prompt]
        if not any(text.strip() for text in texts):
            raise ValueError(f"{where}: {self.prompt!r} is an empty prompt; fill it in or delete the record")
        return prompt

    def _messages(self, value: Any, where: str) -> tuple[Message, ...]:
        rule = (
            f"{where}: {self.prompt!r} must be text or a list of messages with 'role' and 'content', both "
            f"text, not {reprlib.repr(value)}"
        )
        if not isinstance(value, Sequence):
            raise ValueError(rule)
        try:
            return conversation_of(
                [without_missing_arguments(one) if self.is_table else one for one in value]
            )
        except BadMessage as error:
            raise ValueError(
                f"{rule}: {error}; content may be null beside tool_calls, and parts with data.*.images_key"
            ) from error


def _field(record: Mapping[str, Any], key: str, config_key: str, where: str) -> Any:
    try:
        holder, name = holder_of(record, key)
    except NoField as error:
        there = ", ".join(map(repr, error.names))
        rule = f"no field {key!r} (data.*.{config_key}); {error.owner} has {there}"
        raise ValueError(f"{where}: {rule}") from error
    return holder[name]


def jsonl_records(path: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number from 1, JSON object) for each line of a file that is not blank.

    Raises ValueError when ``path`` is not a file, and, with path and line number, for a line that is no JSON
    object in UTF-8 or has half of a surrogate pair, which no tokenizer accepts.
    """
    if not os.path.isfile(path):
        raise ValueError(
            f"data.*.path={path!r} is not a file; kind=jsonl reads one file with an object per line"
        )
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                # Some programs put a byte order mark before the first line.
                text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
                yield number, _json_object(text, f"{path}:{number}")


def _json_object(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode("utf-8").rstrip())
        if _SURROGATE_ESCAPE.search(line):
            json.dumps(record, ensure_ascii=False).encode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where}: not UTF-8 (byte 0x{line[error.start]:02x} at position {error.start + 1}); convert the "
            "file, for example: iconv -f LATIN1 -t UTF-8 (or -f UTF-16)"
        ) from error
    except UnicodeEncodeError as error:
        surrogate = f"\\u{ord(error.object[error.start]):04x}"
        raise ValueError(
            f"{where}: {surrogate} is half of a surrogate pair and no character; write the character, or "
            "both halves"
        ) from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{where}: not valid JSON: {error.msg} at column {error.colno}") from error
    except (ValueError, RecursionError) as error:  # a number of too many digits, too many brackets
        raise ValueError(f"{where}: not valid JSON: {error}") from error
    if not isinstance(record, dict):
        raise ValueError(f"{where}: a line must be a JSON object, not {type(record).__name__}")
    return record


def chosen_jsonl_records(path: str, split: str | None) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the records of ``jsonl_records`` that a split such as ``train[:100]`` chooses; all records for
    None and for a name alone. Raises ValueError as ``chosen_rows`` does."""
    if split is None or is_name(split):
        yield from jsonl_records(path)
        return
    numbered = list(jsonl_records(path))
    for _, rows in chosen_rows(split, {only_name(split, path): len(numbered)}, path):
        yield from numbered[rows.start : rows.stop]
