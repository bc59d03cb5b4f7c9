"""Builds the prompts of training and of validation as the configuration describes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nemo_like.config.import_path import load_by_path
from nemo_like.data.content_digest import DigestedDataset, digest_of, made_contents, record_contents
from nemo_like.data.interface import EnvironmentData, PromptDataset, SourceReport, Split, TaskPrompt
from nemo_like.data.mixture import MixedDataset, Selection, TemplatedDataset, short_enough
from nemo_like.data.options import DatasetConfig, source_name
from nemo_like.data.source_kind import source_kind_of


@dataclass(frozen=True, slots=True)
class Sources:
    """The prompts of all sources, one source after the other, and a report on each source."""

    prompts: PromptDataset
    reports: tuple[SourceReport, ...]


def build_sources(
    sources: Sequence[DatasetConfig],
    split: Split,
    *,
    prompt_lengths: Callable[[Sequence[TaskPrompt]], Sequence[int]],
    max_prompt_tokens: int,
    environments: EnvironmentData | None = None,
) -> Sources:
    """Return the prompts of ``sources`` that have at most ``max_prompt_tokens`` tokens.

    ``prompt_lengths`` counts the tokens of each prompt, its images included. Raises ValueError when a source
    does not fit its data, or has no prompt that is short enough.
    """
    parts: list[PromptDataset] = []
    reports = []
    for cfg in sources:
        digested, name = _digested(cfg, split, environments), source_name(cfg)
        prompts = _templated(digested, cfg, environments)
        kept = short_enough(prompts, prompt_lengths, max_prompt_tokens)
        if not kept:
            raise ValueError(
                f"data.{split}: all {len(prompts)} prompts of {name} are longer than {max_prompt_tokens} "
                "tokens; raise policy.max_total_sequence_length (and data.max_input_seq_length, where set)"
            )
        parts.append(prompts if len(kept) == len(prompts) else Selection(prompts, kept))
        reports.append(
            SourceReport(
                name=name,
                num_prompts=len(kept),
                num_too_long=len(prompts) - len(kept),
                digest=_digest(digested, cfg, environments),
            )
        )
    return Sources(MixedDataset(parts), tuple(reports))


def build_dataset(
    cfg: DatasetConfig, split: Split, environments: EnvironmentData | None = None
) -> PromptDataset:
    """Return the prompts of one source, in the form that the policy gets.

    ``split`` chooses between training and held-out prompts for sources that make their prompts (arithmetic,
    reasoning-gym); a file or a hub dataset is chosen by the source's own keys. ``environments`` makes prompts
    and lists tools. Raises ValueError when a needed key is null, or when the data do not fit.
    """
    return _templated(_read(cfg, split, environments), cfg, environments)


def _templated(
    prompts: PromptDataset, cfg: DatasetConfig, environments: EnvironmentData | None
) -> PromptDataset:
    tools = () if environments is None else environments.tools(cfg.env)
    return TemplatedDataset(prompts, cfg, tools)


def _digested(cfg: DatasetConfig, split: Split, environments: EnvironmentData | None) -> DigestedDataset:
    contents = record_contents if source_kind_of(cfg).reads_records else made_contents
    return DigestedDataset(_read(cfg, split, environments), contents)


def _digest(prompts: DigestedDataset, cfg: DatasetConfig, environments: EnvironmentData | None) -> str:
    """Return the digest of a source's prompts. For prompts that an environment makes it is the digest of the
    settings, since a package or a server need not make the same text twice."""
    if source_kind_of(cfg).asks_environment and environments is not None:
        return digest_of([environments.settings(cfg), cfg.options])
    return prompts.digest()


def _read(cfg: DatasetConfig, split: Split, environments: EnvironmentData | None) -> PromptDataset:
    prompts: PromptDataset = load_by_path(source_kind_of(cfg).problems)(cfg, split, environments)
    return prompts
