"""The description of a kind of data source; each kind has a file with one.

source_kinds/jsonl.py    KIND = SourceKind(about=..., problems="module:function", ...)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from nemo_like.config.problems import Problem
from nemo_like.data.interface import Split
from nemo_like.data.options import SOURCE_KINDS, DatasetConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceKind:
    """A kind of data source.

    about: where its prompts come from.
    problems: import path of ``(cfg, split, environments) -> PromptDataset``, which raises ValueError when a
        needed key is null, or when the data do not fit.
    stream: import path of ``(cfg) -> (where, task_prompt), ...``, for sources that a scan reads in part.
    rules: yields the problems with a source, given its full key.
    reads_records: it has records, whose fields ``prompt_key`` and other keys name.
    reads_parts: ``split`` chooses rows of it.
    is_table: its records are rows of an Arrow table.
    is_here: whether its file or directory is on this machine; True for a source without any.
    missing_remedy: the remedy when it is not here.
    asks_environment: its environment makes its prompts.
    lengths: the numbers of tokens of its prompts and answers, when its keys determine them.
    """

    about: str
    problems: str
    stream: str | None = None
    rules: Callable[[str, DatasetConfig], Iterator[Problem]] | None = None
    reads_records: bool = False
    reads_parts: bool = False
    is_table: bool = False
    is_here: Callable[[DatasetConfig], bool] | None = None
    missing_remedy: str = ""
    asks_environment: bool = False
    lengths: Callable[[DatasetConfig], tuple[int, int]] | None = None


def source_kind_of(cfg: DatasetConfig) -> SourceKind:
    """Return the description of a source's kind."""
    kind: SourceKind = SOURCE_KINDS.load(cfg.kind)
    return kind


def needed_path(cfg: DatasetConfig, split: Split) -> str:
    """Return the path of a source. Raises ValueError when it is null."""
    if cfg.path is None:
        raise ValueError(f"data.{split}.path is null; kind={cfg.kind} needs a path")
    return cfg.path


def is_here(cfg: DatasetConfig) -> bool:
    """Return whether a source's file or directory is on this machine.

    It is true for a source that has none, and for a path that may be the name of a dataset on the hub.
    """
    look = source_kind_of(cfg).is_here
    return look is None or look(cfg)
