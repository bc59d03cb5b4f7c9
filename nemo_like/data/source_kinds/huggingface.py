"""A dataset of the hub, or files that the package datasets reads."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nemo_like.config.problems import Problem
from nemo_like.data.data_rules import missing_path
from nemo_like.data.interface import EnvironmentData, PromptDataset, Split
from nemo_like.data.options import DatasetConfig
from nemo_like.data.source_kind import SourceKind, needed_path
from nemo_like.data.sources import FILE_READERS

_MISSING = "give a file, a directory, or OWNER/NAME of a dataset on the hub"


def _is_here(cfg: DatasetConfig) -> bool:
    if cfg.path is None:
        return True
    path = Path(cfg.path)
    # A name on the hub is one word, or two with a slash between them.
    may_be_on_hub = len(path.parts) <= 2 and not path.is_absolute() and path.suffix not in FILE_READERS
    return path.exists() or may_be_on_hub


def _lacks_split(cfg: DatasetConfig) -> bool:
    """Return whether a source names no part, though what it reads may have several; a file has one."""
    return cfg.split is None and cfg.path is not None and Path(cfg.path).suffix not in FILE_READERS


def _rules(key: str, cfg: DatasetConfig) -> Iterator[Problem]:
    yield from missing_path(key, cfg, _MISSING)
    if _lacks_split(cfg):
        rule = f"must be set for {key}.kind={cfg.kind}"
        yield Problem(key=f"{key}.split=null", rule=rule, remedy='for example "train"')
    if cfg.subset is not None and cfg.path is not None and Path(cfg.path).suffix in FILE_READERS:
        rule = f"is of datasets with several configurations, and {cfg.path} is a file"
        yield Problem(key=f"{key}.subset={cfg.subset}", rule=rule, remedy="set it to null")


def problems(cfg: DatasetConfig, split: Split, environments: EnvironmentData | None) -> PromptDataset:
    """Return the prompts of the rows that ``split`` chooses."""
    from nemo_like.data.loading import load_huggingface
    from nemo_like.data.records import RecordDataset, RecordFields, checked_dataset

    needed_path(cfg, split)
    if _lacks_split(cfg):
        raise ValueError(f"data.{split}.split is null; kind={cfg.kind} needs one, for example train")
    records = load_huggingface(cfg)
    return checked_dataset(
        RecordDataset(
            records,
            RecordFields.of(cfg),
            lambda index: f"{cfg.path} [{cfg.split or 'whole'}], record {index}",
        ),
        cfg,
    )


KIND = SourceKind(
    about="a dataset of the hub, or files that the package datasets reads",
    problems="nemo_like.data.source_kinds.huggingface:problems",
    rules=_rules,
    reads_records=True,
    reads_parts=True,
    is_table=True,
    is_here=_is_here,
    missing_remedy=_MISSING,
)
