"""Datasets that other people wrote: JSON lines, and everything the ``datasets`` library reads."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from nemo_like.data.interface import Message, Prompt, PromptExample

# What load_dataset calls the reader of a file with this ending.
_FILE_READERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet", ".csv": "csv", ".arrow": "arrow"}


class RecordDataset:
    """A sequence of mappings, each with a prompt and an answer.

    The prompt field holds text, or a list of ``{"role": ..., "content": ...}`` messages. All other
    fields of a record become the example's ``data``.
    """

    def __init__(
        self, records: Sequence[Mapping[str, Any]], prompt_key: str, answer_key: str, source: str
    ) -> None:
        if not len(records):
            raise ValueError(f"{source} holds no problems")
        self._records = records
        self._prompt_key = prompt_key
        self._answer_key = answer_key
        self._source = source
        self[0]

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> PromptExample:
        """Raises IndexError outside the dataset, ValueError when a field is missing or malformed."""
        if not 0 <= index < len(self):
            raise IndexError(f"no problem {index} in {self._source}, which holds {len(self)}")
        record = self._records[index]
        prompt = self._prompt(self._field(record, self._prompt_key, "prompt_key", index), index)
        answer = str(self._field(record, self._answer_key, "answer_key", index))
        rest = {
            key: value for key, value in record.items() if key not in (self._prompt_key, self._answer_key)
        }
        return PromptExample(prompt, answer, rest)

    def _field(self, record: Mapping[str, Any], key: str, config_key: str, index: int) -> Any:
        if key not in record:
            raise ValueError(
                f"{self._source}, record {index}: no field {key!r} (data.*.{config_key}); "
                f"it has {', '.join(map(repr, sorted(record)))}"
            )
        return record[key]

    def _prompt(self, value: Any, index: int) -> Prompt:
        if isinstance(value, str):
            return value
        try:
            return tuple(Message(role=entry["role"], content=entry["content"]) for entry in value)
        except (TypeError, KeyError) as error:
            raise ValueError(
                f"{self._source}, record {index}: {self._prompt_key!r} must be text or a list of "
                f"messages with 'role' and 'content', not {type(value).__name__}"
            ) from error


def read_jsonl(path: str) -> list[dict[str, Any]]:
    """One JSON object per line; blank lines are skipped. Raises ValueError with path and line number."""
    if not os.path.isfile(path):
        raise ValueError(
            f"data.*.path={path!r} is not a file; kind=jsonl reads one file with an object per line"
        )
    records = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not valid JSON: {error}") from error
            if not isinstance(record, dict):
                raise ValueError(
                    f"{path}:{number}: a line must be a JSON object, not {type(record).__name__}"
                )
            records.append(record)
    return records


def load_huggingface(path: str, split: str) -> Sequence[Mapping[str, Any]]:
    """One split by hub name, local file, directory of data files, or directory of ``save_to_disk``.

    Raises ValueError when a saved dataset has no such split; the library's own errors otherwise.
    """
    import datasets

    target = Path(path)
    if target.is_file():
        return datasets.load_dataset(_reader_of(target), data_files={split: str(target)}, split=split)
    if (target / "dataset_dict.json").is_file() or (target / "state.json").is_file():
        saved = datasets.load_from_disk(path)
        if not isinstance(saved, datasets.DatasetDict):
            return saved
        if split not in saved:
            raise ValueError(
                f"data.*.split={split!r} is not in {path!r}, which has {', '.join(sorted(saved))}"
            )
        return saved[split]
    return datasets.load_dataset(path, split=split)


def _reader_of(path: Path) -> str:
    if path.suffix not in _FILE_READERS:
        raise ValueError(
            f"data.*.path={str(path)!r} ends in {path.suffix!r}; files must end in {', '.join(_FILE_READERS)}"
        )
    return _FILE_READERS[path.suffix]
