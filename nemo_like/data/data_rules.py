"""Rules on the data sources, from which the policy's prompts come, and on their files."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from nemo_like.config.problems import Problem
from nemo_like.data.options import DataConfig, DatasetConfig, source_name
from nemo_like.data.source_kind import is_here, source_kind_of
from nemo_like.data.sources import RECORD_COLUMN, data_sources

# More digits make more pairs of operands than are worth keeping in memory.
MAX_ARITHMETIC_DIGITS = 3


_PLACE = "{prompt}"
_NO_VALIDATION = (
    "a run without held-out problems has data.validation='${data.train}', with grpo.val_period=0 "
    "grpo.val_at_start=false grpo.val_at_end=false checkpointing.metric_name=null"
)


def data_problems(data: DataConfig, *, must_be_here: bool = True) -> Iterator[Problem]:
    """Yield every problem for which a run could not read its data sources or prompt the policy with them.

    With ``must_be_here=False`` missing files are no problem: a run on another machine may be planned without
    them.
    """
    for key, source in data_sources(data):
        yield from _numbers(key, source)
        yield from _prompts(key, source)
        if (of_kind := source_kind_of(source).rules) is not None:
            yield from of_kind(key, source)
        yield from _parts(key, source)
        yield from _columns(key, source)
        if must_be_here and not is_here(source):
            remedy = source_kind_of(source).missing_remedy
            yield Problem(key=f"{key}.path={source.path}", rule="is not a file", remedy=remedy)
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
    of_kind = source_kind_of(source)
    has_messages = source.use_chat_template or of_kind.reads_records or of_kind.asks_environment
    if source.chat_template_kwargs and not has_messages:
        yield Problem(
            key=f"{key}.chat_template_kwargs",
            rule="has arguments of the chat template, and use_chat_template=false makes no conversation",
            remedy=f"set {key}.use_chat_template=true, or {key}.chat_template_kwargs={{}}",
        )
    if source.system_prompt is not None and not source.use_chat_template:
        yield Problem(
            key=f"{key}.system_prompt={source.system_prompt!r}",
            rule="needs a conversation, and use_chat_template=false makes none",
            remedy=f"set {key}.use_chat_template=true, or write it into prompt_template",
        )


def _columns(key: str, source: DatasetConfig) -> Iterator[Problem]:
    if source.columns and not source_kind_of(source).reads_records:
        yield Problem(
            key=f"{key}.columns",
            rule=f"names fields of records, and kind={source.kind} has none",
            remedy="set it to {}",
        )
    if source.images_key is not None and not source_kind_of(source).reads_records:
        yield Problem(
            key=f"{key}.images_key={source.images_key}",
            rule=f"names a field of records, and kind={source.kind} has none",
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
        remedy = (
            _NO_VALIDATION if section == "validation" else "name where the problems to train on come from"
        )
        yield Problem(key=f"data.{section}=[]", rule="must have at least one source", remedy=remedy)
    for name, count in Counter(map(source_name, sources)).items():
        if count > 1:
            yield Problem(
                key=f"data.{section}",
                rule=f"has {count} sources called {name}, which metrics could not tell apart",
                remedy="give them a name each",
            )


def missing_path(key: str, cfg: DatasetConfig, remedy: str) -> Iterator[Problem]:
    """Yield a problem for a source without the path that its kind needs."""
    if not cfg.path:
        rule = f"must be set for {key}.kind={cfg.kind}"
        without = f"; {_NO_VALIDATION}" if key == "data.validation" else ""
        yield Problem(
            key=f"{key}.path={'null' if cfg.path is None else ''}", rule=rule, remedy=remedy + without
        )


def _parts(key: str, cfg: DatasetConfig) -> Iterator[Problem]:
    """Yield every problem with the part of a dataset that a source shall read."""
    if (
        cfg.split is not None
        and ("[" in cfg.split or "+" in cfg.split)
        and not source_kind_of(cfg).reads_parts
    ):
        yield Problem(
            key=f"{key}.split={cfg.split}",
            rule=f"chooses rows of a dataset, and kind={cfg.kind} makes its problems itself",
            remedy="say how many with options.size, where the kind has it; set split to null",
        )
    if cfg.subset is not None and not source_kind_of(cfg).is_table:
        rule = f"is of datasets of the hub, and would not be read with kind={cfg.kind}"
        yield Problem(key=f"{key}.subset={cfg.subset}", rule=rule, remedy="set it to null")
