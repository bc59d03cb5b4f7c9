"""Sums of two numbers, made from their number of digits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from nemo_like.config.problems import Problem
from nemo_like.data.interface import EnvironmentData, PromptDataset, Split
from nemo_like.data.options import DatasetConfig
from nemo_like.data.source_kind import SourceKind
from nemo_like.data.sources import FILE_READERS


def _lengths(cfg: DatasetConfig) -> tuple[int, int]:
    return 2 * cfg.digits + 2, cfg.digits + 1


def _rules(key: str, cfg: DatasetConfig) -> Iterator[Problem]:
    """Yield a problem for a file that would not be read, since sums of two numbers are made from digits."""
    if cfg.path is None:
        return
    suffix = Path(cfg.path).suffix
    kind = "huggingface" if suffix in FILE_READERS.keys() - {".jsonl"} else "jsonl"
    yield Problem(
        key=f"{key}.path={cfg.path}",
        rule=f"would not be read: {key}.kind=arithmetic makes its problems itself",
        remedy=f"for the problems of a file set {key}.kind={kind}, or data.default.kind for all "
        f"sources; for sums set {key}.path=null",
    )


def problems(cfg: DatasetConfig, split: Split, environments: EnvironmentData | None) -> PromptDataset:
    """Return the sums of a split."""
    from nemo_like.data.arithmetic import ArithmeticDataset

    return ArithmeticDataset(cfg.digits, split)


KIND = SourceKind(
    about="sums of two numbers, made from their number of digits",
    problems="nemo_like.data.source_kinds.arithmetic:problems",
    rules=_rules,
    lengths=_lengths,
)
