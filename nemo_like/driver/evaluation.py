"""The driver of a run that only evaluates: it samples held-out prompts as a validation does, and reports.

held_out_prompts ──▶ rollout.run ──▶ validation_report ──▶ metrics.jsonl
                          │              the same, with errors, by set, task and difficulty
                          ▼                                ──▶ evaluation.json, a table
                rollouts/validation_N.jsonl: all answers
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nemo_like.algorithms.error_bars import METHOD, Estimate
from nemo_like.algorithms.held_out import held_out_estimates
from nemo_like.algorithms.options import GRPOConfig
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.batch.tags import AS_LOADED, DIFFICULTY, IS_JUDGED, TASK
from nemo_like.config.secrets import as_written
from nemo_like.configuration import Config
from nemo_like.driver.interface import Partitions, Recovery, Rollout
from nemo_like.driver.options import EvaluationConfig
from nemo_like.driver.validation import (
    ValidationReport,
    ValidationSet,
    answers_of,
    held_out_prompts,
    validation_report,
)
from nemo_like.observability.disk import write_whole
from nemo_like.observability.logger import RunLogger
from nemo_like.observability.run_directory import RunDirectory
from nemo_like.observability.summary import SampleAnswer
from nemo_like.observability.timers import StageTimer
from nemo_like.rollout.prompts import RolloutResult


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationComponents:
    """The concrete parts of an evaluation, put together by ``setup``."""

    partitions: Partitions
    rollout: Rollout
    validation_sets: tuple[ValidationSet, ...]
    logger: RunLogger
    directory: RunDirectory
    recovery: Recovery


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportedGroup:
    """Prompts that are reported together: all prompts, or the prompts of one set, of one task, of one
    difficulty, or of one task and difficulty."""

    by: str  # "all", "set", "task", "difficulty" or "task and difficulty"
    name: str
    num_problems: int
    num_answers: int
    num_failed_rewards: int  # answers that nobody could judge; they enter no estimate
    estimates: Mapping[str, Estimate]


class EvaluationDriver:
    """Evaluates once; carries ``KVBatchMeta`` and floats, never a token."""

    def __init__(self, cfg: Config, evaluation: EvaluationConfig, components: EvaluationComponents) -> None:
        self.cfg, self.evaluation = cfg, evaluation
        self.components = components
        self.sample_answers: Sequence[SampleAnswer] = ()

    def run(self) -> None:
        """Evaluate, log the metrics, write evaluation.json, and print its table."""
        parts, step, grpo = self.components, self.evaluation.step, self.cfg.grpo
        parts.logger.status("answering the problems")
        rollout, report = parts.recovery.completed("the evaluation", AS_LOADED, self.held_out)
        groups = [*reported_groups(rollout.batch, parts.validation_sets, grpo)]
        text = json.dumps(self._contents(groups), indent=2, ensure_ascii=False) + "\n"
        write_whole(parts.directory.evaluation_path, text.encode(), "the evaluation")
        parts.logger.log_validation(step, report.metrics, self.sample_answers)
        parts.logger.flush(step)
        for line in evaluation_table(groups):
            parts.logger.note(line)

    def held_out(self) -> tuple[RolloutResult, ValidationReport]:
        """Roll out all held-out sets as a validation does; return the samples' metadata and the report."""
        parts, grpo, timer, step = self.components, self.cfg.grpo, StageTimer(), self.evaluation.step
        prompts = held_out_prompts(parts.validation_sets, step, AS_LOADED, grpo)
        with timer("validation"), parts.partitions.partition(f"validation-{step}") as partition:
            rollout = parts.rollout.run(prompts, partition)
        parts.partitions.take_operations()  # not reported, as in a validation
        self.sample_answers = parts.rollout.sample_answers()
        timing = timer.metrics("timing/validation/")
        return rollout, validation_report(rollout, parts.validation_sets, grpo, timing)

    def _contents(self, groups: Sequence[ReportedGroup]) -> dict[str, Any]:
        asked = self.evaluation
        if asked.base_url is None:
            source: dict[str, Any] = {"checkpoint": self.cfg.policy.model_name}
        else:
            source = {"endpoint": as_written(asked.base_url), "model": asked.model}
        return {
            **source,
            "step": asked.step,
            "seed": self.cfg.grpo.seed,
            "solved_reward": self.cfg.grpo.val_solved_reward,
            "answers": f"rollouts/validation_{asked.step}.jsonl",
            "method": METHOD,
            "groups": [_as_json(group) for group in groups],
        }


def reported_groups(
    batch: KVBatchMeta, sets: Sequence[ValidationSet], cfg: GRPOConfig
) -> Iterator[ReportedGroup]:
    """Yield one group of all prompts; then one for each set, task and difficulty, where there are several;
    then one for each difficulty of each task, where there are several of both.

    ``batch`` has the samples of the sets, one set after the other.
    """
    size, places = cfg.num_val_generations_per_prompt, range(len(batch))
    names = [each.name for each in sets for _ in range(len(each.indices) * size)]
    tasks, difficulties = batch.tag(TASK), batch.tag(DIFFICULTY)
    both = [f"{task}, {difficulty}" for task, difficulty in zip(tasks, difficulties, strict=True)]
    has_both = len(set(tasks)) > 1 and len(set(difficulties)) > 1
    yield _group(batch, "all", "all", cfg)
    columns = {"set": names, "task": tasks, "difficulty": difficulties}
    for by, values in {**columns, **({"task and difficulty": both} if has_both else {})}.items():
        members: dict[str, list[int]] = {}
        for place in places:
            members.setdefault(values[place], []).append(place)
        if len(members) > 1:
            ordered = sorted(members.items(), key=_in_order) if by != "set" else members.items()
            for name, rows in ordered:
                yield _group(batch.subset(rows), by, name, cfg)


def evaluation_table(groups: Sequence[ReportedGroup]) -> list[str]:
    """Return the groups as lines for a terminal: each metric with its confidence interval. Mean rewards are
    left out when they equal the accuracy."""
    names = list(groups[0].estimates)
    if all(one.estimates.get("reward") == one.estimates.get("accuracy") for one in groups):
        names = [name for name in names if name != "reward"]
    head = ["", "problems", *names]
    rows = [
        [
            "all" if group.by == "all" else f"{group.by} {group.name or '(none)'}",
            str(group.num_problems),
            *(_shown(group.estimates.get(name)) for name in names),
        ]
        for group in groups
    ]
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    lines = [
        "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]
    return ["", *lines, "", METHOD]


def _group(batch: KVBatchMeta, by: str, name: str, cfg: GRPOConfig) -> ReportedGroup:
    problems = answers_of(batch)
    return ReportedGroup(
        by=by,
        name=name,
        num_problems=len(problems),
        num_answers=len(batch),
        num_failed_rewards=len(batch) - sum(batch.tag(IS_JUDGED)),
        estimates=held_out_estimates(problems, cfg.num_val_generations_per_prompt, cfg.val_solved_reward),
    )


def _as_json(group: ReportedGroup) -> dict[str, Any]:
    return {
        "by": group.by,
        "name": group.name,
        "num_problems": group.num_problems,
        "num_answers": group.num_answers,
        "num_failed_rewards": group.num_failed_rewards,
        "metrics": {
            name: {"value": one.value, "standard_error": one.standard_error, "interval": one.interval}
            for name, one in group.estimates.items()
        },
    }


def _shown(estimate: Estimate | None) -> str:
    if estimate is None:
        return "-"
    ends = estimate.interval
    return f"{estimate.value:.3f}" + ("" if ends is None else f" [{ends[0]:.3f}, {ends[1]:.3f}]")


def _in_order(item: tuple[str, object]) -> tuple[bool, float, str]:
    """Return a sort key that puts numbers before other names, in numerical order."""
    try:
        return False, float(item[0]), ""
    except ValueError:
        return True, 0.0, item[0]
