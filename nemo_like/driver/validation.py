"""Chooses the held-out prompts of a validation, and reports on the answers, one set per source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nemo_like.algorithms.held_out import Answers, held_out_metrics
from nemo_like.algorithms.options import GRPOConfig
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.batch.tags import ANSWER_ID, GROUP_ID, IS_JUDGED, IS_TRUNCATED, NUM_RESPONSE_TOKENS, REWARD
from nemo_like.data.interface import SourceReport
from nemo_like.driver.run_failures import RunFailed
from nemo_like.rollout.prompts import PromptBatch, RolloutMode, RolloutResult


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """The metrics of a validation under their final names; see docs/reference/metrics.md."""

    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class ValidationSet:
    """The prompts of one source that a validation samples, by their index in the validation dataset."""

    name: str
    indices: tuple[int, ...]


def validation_sets(sources: Sequence[SourceReport], max_samples: int) -> tuple[ValidationSet, ...]:
    """Return for every source a set of its first ``max_samples`` prompts."""
    sets, start = [], 0
    for source in sources:
        stop = start + min(source.num_prompts, max_samples)
        sets.append(ValidationSet(source.name, tuple(range(start, stop))))
        start += source.num_prompts
    return tuple(sets)


def held_out_prompts(
    sets: Sequence[ValidationSet], step: int, policy_version: int, cfg: GRPOConfig
) -> PromptBatch:
    """Return the prompts of a validation after ``step``: all sets, one after the other."""
    return PromptBatch(
        mode=RolloutMode.validation,
        step=step,
        policy_version=policy_version,
        indices=tuple(index for each in sets for index in each.indices),
        num_generations=cfg.num_val_generations_per_prompt,
    )


def validation_report(
    rollout: RolloutResult, sets: Sequence[ValidationSet], cfg: GRPOConfig, timing: Mapping[str, float]
) -> ValidationReport:
    """Return metrics over all sets and, when there are several, over each set.

    The rollout's groups are the sets' prompts, one set after the other. Samples whose reward failed do not
    count in accuracy and rewards.
    """
    batch, size = rollout.batch, cfg.num_val_generations_per_prompt
    metrics = _metrics(batch, cfg)
    start = 0
    for each in sets:
        stop = start + len(each.indices) * size
        if len(sets) > 1 and stop > start:
            own = _metrics(batch.slice(start, stop), cfg)
            metrics |= {f"{each.name}/{name}": value for name, value in own.items()}
        start = stop
    return ValidationReport({**{f"validation/{name}": value for name, value in metrics.items()}, **timing})


def reached_goal(metrics: Mapping[str, float], cfg: GRPOConfig) -> bool:
    """Return whether the step with these metrics reached ``grpo.val_stop_threshold`` and the run may stop.

    Return False after a step without a validation. Raises RunFailed when ``grpo.val_stop_metric`` is no
    metric of the validation.
    """
    validated = sorted(name for name in metrics if name.startswith("validation/"))
    if cfg.val_stop_threshold is None or not validated:
        return False
    if cfg.val_stop_metric not in validated:
        if metrics.get(f"{cfg.val_stop_metric.rpartition('/')[0]}/num_failed_rewards"):
            return False  # so many rewards failed that the validation could not compute the metric
        raise RunFailed(
            f"grpo.val_stop_metric={cfg.val_stop_metric} is no metric of the validation; there are "
            f"{', '.join(validated)}"
        )
    return metrics[cfg.val_stop_metric] >= cfg.val_stop_threshold


def _metrics(batch: KVBatchMeta, cfg: GRPOConfig) -> dict[str, float]:
    num_failed = len(batch) - sum(batch.tag(IS_JUDGED))
    return {
        **held_out_metrics(answers_of(batch), cfg.num_val_generations_per_prompt, cfg.val_solved_reward),
        "avg_length": sum(batch.tag(NUM_RESPONSE_TOKENS)) / len(batch),
        "truncation_rate": sum(batch.tag(IS_TRUNCATED)) / len(batch),
        "num_samples": float(len(batch)),
        "num_failed_rewards": float(num_failed),
        "failed_reward_share": num_failed / len(batch),
    }


def answers_of(batch: KVBatchMeta) -> list[Answers]:
    """Return the rewards and answer ids of each prompt's samples, without samples that were not judged."""
    problems: dict[object, tuple[list[float], list[int]]] = {}
    for group_id, reward, answer_id, is_judged in zip(
        batch.tag(GROUP_ID),
        batch.tag(REWARD),
        batch.tag(ANSWER_ID),
        batch.tag(IS_JUDGED),
        strict=True,
    ):
        rewards, answer_ids = problems.setdefault(group_id, ([], []))
        if is_judged:
            rewards.append(reward)
            answer_ids.append(answer_id)
    return [Answers(*problem) for problem in problems.values()]
