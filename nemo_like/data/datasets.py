"""Builds the problems of training and of validation as the configuration describes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_like.data.arithmetic import ArithmeticDataset
from nemo_like.data.content_digest import DigestedDataset, digest_of, made_contents, record_contents
from nemo_like.data.interface import EnvironmentData, PromptDataset, PromptExample, SourceReport, Split
from nemo_like.data.loading import load_huggingface
from nemo_like.data.mixture import MixedDataset, Selection, TemplatedDataset, short_enough
from nemo_like.data.options import DatasetConfig, DatasetKind, source_name
from nemo_like.data.reasoning_gym import ReasoningGymDataset
from nemo_like.data.records import RecordDataset, RecordFields, chosen_jsonl_records

_KINDS_OF_RECORDS = (DatasetKind.jsonl, DatasetKind.huggingface)


@dataclass(frozen=True, slots=True)
class Sources:
    """The problems of all sources, one source after the other, and a report of each source."""

    problems: PromptDataset
    reports: tuple[SourceReport, ...]


def build_sources(
    sources: Sequence[DatasetConfig],
    split: Split,
    *,
    prompt_lengths: Callable[[Sequence[PromptExample]], Sequence[int]],
    max_prompt_tokens: int,
    environments: EnvironmentData | None = None,
) -> Sources:
    """Return the problems of ``sources`` whose prompts have at most ``max_prompt_tokens`` tokens.

    ``prompt_lengths`` counts the tokens of each problem's prompt, its images included. Raises ValueError when
    a source does not fit its data, or has no prompt that is short enough.
    """
    parts: list[PromptDataset] = []
    reports = []
    for cfg in sources:
        digested, name = _digested(cfg, split, environments), source_name(cfg)
        problems = _templated(digested, cfg, environments)
        kept = short_enough(problems, prompt_lengths, max_prompt_tokens)
        if not kept:
            raise ValueError(
                f"data.{split}: all {len(problems)} prompts of {name} are longer than {max_prompt_tokens} "
                "tokens; raise policy.max_total_sequence_length (and data.max_input_seq_length, where set)"
            )
        parts.append(problems if len(kept) == len(problems) else Selection(problems, kept))
        reports.append(
            SourceReport(
                name=name,
                num_prompts=len(kept),
                num_too_long=len(problems) - len(kept),
                digest=_digest(digested, cfg, environments),
            )
        )
    return Sources(MixedDataset(parts), tuple(reports))


def build_dataset(
    cfg: DatasetConfig, split: Split, environments: EnvironmentData | None = None
) -> PromptDataset:
    """Return the problems of one source, with their prompts as the policy gets them.

    ``split`` chooses between training and held-out problems where the dataset makes them itself (arithmetic,
    reasoning-gym); a file or a hub dataset gives what the source's own keys name. ``environments`` bring
    what a source needs of them. Raises ValueError when a key that is needed is null, or when the data do not
    fit.
    """
    return _templated(_problems(cfg, split, environments), cfg, environments)


def _templated(
    problems: PromptDataset, cfg: DatasetConfig, environments: EnvironmentData | None
) -> PromptDataset:
    tools = () if environments is None else environments.tools(cfg.env)
    return TemplatedDataset(problems, cfg, tools)


def _digested(cfg: DatasetConfig, split: Split, environments: EnvironmentData | None) -> DigestedDataset:
    contents = record_contents if cfg.kind in _KINDS_OF_RECORDS else made_contents
    return DigestedDataset(_problems(cfg, split, environments), contents)


def _digest(problems: DigestedDataset, cfg: DatasetConfig, environments: EnvironmentData | None) -> str:
    """Return the digest of a source's problems; of problems that an environment makes that of its settings,
    since a package or a server need not make the same text twice."""
    if cfg.kind is DatasetKind.environment and environments is not None:
        return digest_of([environments.settings(cfg), cfg.options])
    return problems.digest()


def _problems(cfg: DatasetConfig, split: Split, environments: EnvironmentData | None) -> PromptDataset:
    if cfg.kind is DatasetKind.environment:
        if environments is None:
            raise ValueError(f"data.{split}.kind=environment needs its environment, which is not there")
        return environments.problems(cfg, split)
    if cfg.kind is DatasetKind.arithmetic:
        return ArithmeticDataset(cfg.digits, split)
    if cfg.path is None:
        raise ValueError(f"data.{split}.path is null; kind={cfg.kind.value} needs a path")
    if cfg.kind is DatasetKind.reasoning_gym:
        return ReasoningGymDataset(cfg.path, cfg.options, split)
    fields = RecordFields.of(cfg)
    if cfg.kind is DatasetKind.jsonl:
        numbered = list(chosen_jsonl_records(cfg.path, cfg.split))
        records: Sequence[Mapping[str, Any]] = [record for _, record in numbered]
        dataset = RecordDataset(records, fields, lambda index: f"{cfg.path}:{numbered[index][0]}")
    else:
        if cfg.split is None:
            raise ValueError(
                f"data.{split}.split is null; kind={cfg.kind.value} needs one, for example train"
            )
        records = load_huggingface(cfg)
        dataset = RecordDataset(records, fields, lambda index: f"{cfg.path} [{cfg.split}], record {index}")
    if not len(dataset):
        raise ValueError(f"{cfg.path} holds no problems")
    dataset[0]  # a wrong prompt_key or answer_key raises now, not in a step
    return dataset
