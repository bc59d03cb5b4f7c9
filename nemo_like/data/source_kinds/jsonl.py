"""A file with one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from nemo_like.config.problems import Problem
from nemo_like.data.data_rules import missing_path
from nemo_like.data.interface import EnvironmentData, PromptDataset, Split, TaskPrompt
from nemo_like.data.nested_fields import NoField, holder_of
from nemo_like.data.options import DatasetConfig
from nemo_like.data.source_kind import SourceKind, needed_path

_MISSING = 'give a file with one object per line, {"prompt": ..., "answer": ...}'


_OTHER_FILES = (".csv", ".tsv", ".parquet", ".arrow")


def _is_here(cfg: DatasetConfig) -> bool:
    return not cfg.path or Path(cfg.path).is_file()


def _rules(key: str, cfg: DatasetConfig) -> Iterator[Problem]:
    yield from missing_path(key, cfg, _MISSING)
    if not cfg.path:
        return
    if what := _what_else(Path(cfg.path)):
        remedy = f"set {key}.kind=huggingface, which reads such {what}s"
        rule = f"is a {what}, where kind=jsonl needs one JSON object per line"
        yield Problem(key=f"{key}.path={cfg.path}", rule=rule, remedy=remedy)
    elif _is_here(cfg):
        yield from _json_lines(key, cfg, Path(cfg.path))


def _what_else(path: Path) -> str | None:
    """Return what a path leads to that has no lines of JSON objects; None when it may have some."""
    if path.is_dir():
        return "folder"
    if path.suffix in _OTHER_FILES:
        return f"{path.suffix} file"
    if path.is_file():
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            first_line = next((line.lstrip() for line in file if line.strip()), "")
        if first_line.startswith("["):
            return "JSON list"
    return None


def _json_lines(key: str, cfg: DatasetConfig, path: Path) -> Iterator[Problem]:
    with path.open(encoding="utf-8-sig", errors="replace") as file:
        first_line = next((line for line in file if line.strip()), "")
    try:
        record = json.loads(first_line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        return  # the scan of all records says later what is wrong, and where
    named = [("prompt_key", cfg.prompt_key), ("answer_key", cfg.answer_key)]
    for name, field in [*named, *(("columns", field) for field in cfg.columns)]:
        try:
            holder_of(record, field)
        except NoField as error:
            whose = "whose first record" if error.owner == "it" else f"in whose first record {error.owner}"
            rule = f"is not a field of {path}, {whose} has {', '.join(error.names)}"
            yield Problem(key=f"{key}.{name}={field}", rule=rule, remedy="name one of them")


def problems(cfg: DatasetConfig, split: Split, environments: EnvironmentData | None) -> PromptDataset:
    """Return the prompts of the lines that ``split`` chooses."""
    from nemo_like.data.records import RecordDataset, RecordFields, checked_dataset, chosen_jsonl_records

    numbered = list(chosen_jsonl_records(needed_path(cfg, split), cfg.split))
    records = [record for _, record in numbered]
    return checked_dataset(
        RecordDataset(records, RecordFields.of(cfg), lambda index: f"{cfg.path}:{numbered[index][0]}"), cfg
    )


def stream(cfg: DatasetConfig) -> Iterator[tuple[str, TaskPrompt]]:
    """Yield the prompts with their origins, read line by line."""
    from nemo_like.data.records import RecordFields, chosen_jsonl_records

    fields = RecordFields.of(cfg)
    for number, record in chosen_jsonl_records(str(cfg.path), cfg.split):
        where = f"{cfg.path}:{number}"
        yield where, fields.task_prompt(record, where)


KIND = SourceKind(
    about="a file with one JSON object per line",
    problems="nemo_like.data.source_kinds.jsonl:problems",
    stream="nemo_like.data.source_kinds.jsonl:stream",
    rules=_rules,
    reads_records=True,
    reads_parts=True,
    is_here=_is_here,
    missing_remedy=_MISSING,
)
