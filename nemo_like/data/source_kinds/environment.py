"""Prompts that the environment of a source makes."""

from __future__ import annotations

from collections.abc import Iterator

from nemo_like.config.problems import Problem
from nemo_like.data.interface import EnvironmentData, PromptDataset, Split
from nemo_like.data.options import DatasetConfig
from nemo_like.data.source_kind import SourceKind


def _rules(key: str, cfg: DatasetConfig) -> Iterator[Problem]:
    """Yield every problem with a source whose environment makes its prompts."""
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


def problems(cfg: DatasetConfig, split: Split, environments: EnvironmentData | None) -> PromptDataset:
    """Return the prompts that the environment makes. Raises ValueError when it makes none, or is missing."""
    if environments is None:
        raise ValueError(f"data.{split}.kind=environment needs its environment, which is not there")
    return environments.prompts(cfg, split)


KIND = SourceKind(
    about="problems that the environment which judges them makes",
    problems="nemo_like.data.source_kinds.environment:problems",
    rules=_rules,
    asks_environment=True,
)
