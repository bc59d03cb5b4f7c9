"""Prompts that the package reasoning-gym makes."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from nemo_like.config.problems import Problem
from nemo_like.data.data_rules import missing_path
from nemo_like.data.interface import EnvironmentData, PromptDataset, Split
from nemo_like.data.options import DatasetConfig
from nemo_like.data.source_kind import SourceKind, needed_path


def _rules(key: str, cfg: DatasetConfig) -> Iterator[Problem]:
    yield from missing_path(key, cfg, "give the name of a dataset of reasoning-gym")
    if find_spec("reasoning_gym") is None:
        yield Problem(
            key=f"{key}.kind=reasoning_gym",
            rule="needs the package reasoning-gym",
            remedy="pip install reasoning-gym",
        )


def problems(cfg: DatasetConfig, split: Split, environments: EnvironmentData | None) -> PromptDataset:
    """Return the prompts of the dataset that ``path`` names."""
    from nemo_like.data.reasoning_gym import ReasoningGymDataset

    return ReasoningGymDataset(needed_path(cfg, split), cfg.options, split)


KIND = SourceKind(
    about="problems that reasoning-gym makes; path names its dataset",
    problems="nemo_like.data.source_kinds.reasoning_gym:problems",
    rules=_rules,
)
