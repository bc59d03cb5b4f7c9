"""Rules on the data sources, which problems for the policy come from, and on their files."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from nemo_like.config.problems import Problem
from nemo_like.data.options import DataConfig, DatasetConfig, DatasetKind, source_name
from nemo_like.data.sources import FILE_READERS, RECORD_COLUMN, data_sources, is_here

# More digits make more pairs of operands than are worth keeping in memory.
MAX_ARITHMETIC_DIGITS = 3


_PLACE = "{prompt}"
_NO_VALIDATION = (
    "; a run without held-out problems names those of data.train here, with grpo.val_period=0 "
    "grpo.val_at_start=false grpo.val_at_end=false checkpointing.metric_name=null"
)
_MISSING = {
    DatasetKind.jsonl: 'give a file with one object per line, {"prompt": ..., "answer": ...}',
    DatasetKind.huggingface: "give a file, a directory, or OWNER/NAME of a dataset on the hub",
}


def data_problems(data: DataConfig, *, must_be_here: bool = True) -> Iterator[Problem]:
    """Yield every problem for which a run could not read its data sources and prompt the policy with them.

    With ``must_be_here=False`` missing files are no problem: a run elsewhere may be planned without them.
    """
    for key, source in data_sources(data):
        yield from _numbers(key, source)
        yield from _prompts(key, source)
        yield from _path(key, source)
        yield from _parts(key, source)
        yield from _columns(key, source)
        if must_be_here and not is_here(source):
            yield Problem(key=f"{key}.path={source.path}", rule="is not a file", remedy=_MISSING[source.kind])
    for section, sources in (("train", data.train), ("validation", data.validation)):
        yield from _names(section, sources)
    limit, template = data.max_input_seq_length, data.chat_template
    if limit is not None and limit < 1:
        yield Problem(key=f"data.max_input_seq_length={limit}", rule="must be at least 1", remedy="")
    if template is not None and not Path(template).is_file():
        yield Problem(key=f"data.chat_template={template}", rule="is not a file", remedy="")


def _numbers(key: str, source: DatasetConfig) -> Iterator[Problem]:
    if not 1 <= source.digits <= MAX_ARITHMETIC_DIGITS:
        yield Problem(
            key=f"{key}.digits={source.digits}",
            rule=f"must be at least 1 and at most {MAX_ARITHMETIC_DIGITS}",
            remedy="",
        )
    if not source.weight > 0:
        yield Problem(
            key=f"{key}.weight={source.weight:g}",
            rule="must be above 0",
            remedy="leave out a source that shall not be used",
        )


def _prompts(key: str, source: DatasetConfig) -> Iterator[Problem]:
    if source.prompt_template is not None and _PLACE not in source.prompt_template:
        yield Problem(
            key=f"{key}.prompt_template={source.prompt_template!r}",
            rule=f"must say where the prompt goes: {_PLACE}",
            remedy="",
        )
    if source.system_prompt is not None and not source.use_chat_template:
        yield Problem(
            key=f"{key}.system_prompt={source.system_prompt!r}",
            rule="needs a conversation, and use_chat_template=false makes none",
            remedy=f"set {key}.use_chat_template=true, or write it into prompt_template",
        )


def _columns(key: str, source: DatasetConfig) -> Iterator[Problem]:
    if source.columns and source.kind not in _MISSING:
        yield Problem(
            key=f"{key}.columns",
            rule=f"names fields of records, and kind={source.kind.value} has none",
            remedy="set it to {}",
        )
    if source.images_key is not None and source.kind not in _MISSING:
        yield Problem(
            key=f"{key}.images_key={source.images_key}",
            rule=f"names a field of records, and kind={source.kind.value} has none",
            remedy="set it to null",
        )
    for name in source.columns:
        if "/" in name:
            yield Problem(key=f"{key}.columns.{name}", rule="has a slash in its name", remedy="rename it")
    for name, text in source.columns.items():
        if RECORD_COLUMN.fullmatch(text) is None:
            yield Problem(
                key=f"{key}.columns.{name}={text}",
                rule="is no column",
                remedy='write a dtype ("float32"), with a shape ("uint8[4, 2]") or a value for each token of '
                'the prompt ("per_token float32"), or "ragged" or "objects"',
            )


def _names(section: str, sources: Sequence[DatasetConfig]) -> Iterator[Problem]:
    if not sources:
        yield Problem(key=f"data.{section}=[]", rule="must have at least one source", remedy="")
    for name, count in Counter(map(source_name, sources)).items():
        if count > 1:
            yield Problem(
                key=f"data.{section}",
                rule=f"has {count} sources called {name}, which metrics could not tell apart",
                remedy="give them a name each",
            )


def _path(key: str, cfg: DatasetConfig) -> Iterator[Problem]:
    if cfg.kind is DatasetKind.arithmetic:
        yield from _computed(key, cfg)
        return
    if cfg.kind is DatasetKind.environment:
        yield from _made(key, cfg)
        return
    if cfg.path is None:
        rule = f"must be set for {key}.kind={cfg.kind.value}"
        remedy = _MISSING.get(cfg.kind, "give the name of a dataset of reasoning-gym")
        without = _NO_VALIDATION if key == "data.validation" else ""
        yield Problem(key=f"{key}.path=null", rule=rule, remedy=remedy + without)
    if cfg.kind is DatasetKind.huggingface and cfg.split is None:
        rule = f"must be set for {key}.kind={cfg.kind.value}"
        yield Problem(key=f"{key}.split=null", rule=rule, remedy='for example "train"')
    if cfg.kind is DatasetKind.reasoning_gym and find_spec("reasoning_gym") is None:
        yield Problem(
            key=f"{key}.kind=reasoning_gym",
            rule="needs the package reasoning-gym",
            remedy="pip install reasoning-gym",
        )
    if cfg.kind is DatasetKind.jsonl and cfg.path is not None and is_here(cfg):
        yield from _json_lines(key, cfg, Path(cfg.path))


def _parts(key: str, cfg: DatasetConfig) -> Iterator[Problem]:
    """Yield every problem with the part of a dataset that a source shall read."""
    if cfg.split is not None and ("[" in cfg.split or "+" in cfg.split) and cfg.kind not in _MISSING:
        yield Problem(
            key=f"{key}.split={cfg.split}",
            rule=f"chooses rows of a dataset, and kind={cfg.kind.value} makes its problems itself",
            remedy="say how many with options.size, where the kind has it; set split to null",
        )
    if cfg.subset is None:
        return
    if cfg.kind is not DatasetKind.huggingface:
        rule = f"is of datasets of the hub, and would not be read with kind={cfg.kind.value}"
        yield Problem(key=f"{key}.subset={cfg.subset}", rule=rule, remedy="set it to null")
    elif cfg.path is not None and Path(cfg.path).suffix in FILE_READERS:
        rule = f"is of datasets with several configurations, and {cfg.path} is a file"
        yield Problem(key=f"{key}.subset={cfg.subset}", rule=rule, remedy="set it to null")


def _computed(key: str, cfg: DatasetConfig) -> Iterator[Problem]:
    """Yield the problem of a file that nobody would read, since sums of two numbers are made from digits."""
    if cfg.path is None:
        return
    suffix = Path(cfg.path).suffix
    kind = DatasetKind.huggingface if suffix in FILE_READERS.keys() - {".jsonl"} else DatasetKind.jsonl
    yield Problem(
        key=f"{key}.path={cfg.path}",
        rule=f"would not be read: {key}.kind=arithmetic makes its problems itself",
        remedy=f"for the problems of a file set {key}.kind={kind.value}, or data.default.kind for all "
        f"sources; for sums set {key}.path=null",
    )


def _made(key: str, cfg: DatasetConfig) -> Iterator[Problem]:
    """Yield every problem with a source whose environment makes its problems."""
    if cfg.path is not None:
        rule = "must be null: the environment makes the problems"
        yield Problem(key=f"{key}.path={cfg.path}", rule=rule, remedy="name the environment in env")
    for name, at_least in (("size", 1), ("seed", 0)):
        value = cfg.options.get(name, at_least if name == "seed" else None)
        if not isinstance(value, int) or value < at_least:
            yield Problem(
                key=f"{key}.options.{name}={value}",
                rule=f"must be a number, at least {at_least}",
                remedy="for example options={size: 1000, seed: 0}",
            )
    if unknown := sorted(cfg.options.keys() - {"size", "seed"}):
        yield Problem(
            key=f"{key}.options.{unknown[0]}",
            rule="is no option of problems that an environment makes, which has size and seed",
            remedy="options of the environment itself are in env.<name>.options",
        )


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
        if field not in record:
            rule = f"is not a field of {path}, whose first record has {', '.join(sorted(record))}"
            yield Problem(key=f"{key}.{name}={field}", rule=rule, remedy="name one of them")
