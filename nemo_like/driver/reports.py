"""Metrics of a step and of a validation under their final names, from tags and already reduced parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nemo_like.algorithms.advantages import baseline_reward_metrics
from nemo_like.data_plane.meta import KVBatchMeta
from nemo_like.observability.metrics import Metric
from nemo_like.observability.timers import StageTimer
from nemo_like.policy.results import ScoredBatch, TrainUpdate
from nemo_like.rollout.prompts import RolloutResult


@dataclass(frozen=True, slots=True)
class StepReport:
    """``metrics`` under their final names, see docs/metrics.md."""

    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class ValidationReport:
    metrics: dict[str, float]


def train_report(
    batch: KVBatchMeta,
    rollout: RolloutResult,
    scored: ScoredBatch,
    update: TrainUpdate,
    sync_metrics: Mapping[str, Metric],
    timer: StageTimer,
) -> StepReport:
    """Everything a step logs."""
    train = {**_values(rollout.metrics), **_values(scored.metrics), **_values(update.metrics), **_tag_metrics(batch)}
    timing = timer.metrics("timing/train/")
    return StepReport(
        {
            **{f"train/{name}": value for name, value in train.items()},
            **{f"weight_sync/{name}": value for name, value in _values(sync_metrics).items()},
            **timing,
            "timing/train/reward": rollout.reward_s,
            "timing/train/rollout_put": rollout.put_s,
            **_performance(batch, rollout, scored.compute_s + update.compute_s, timing),
        }
    )


def validation_report(rollout: RolloutResult, timer: StageTimer) -> ValidationReport:
    """Accuracy is the mean reward of samples whose reward did not fail."""
    batch = rollout.batch
    valid = [reward for reward, mask in zip(batch.tag("reward"), batch.tag("sample_mask"), strict=True) if mask]
    return ValidationReport(
        {
            "validation/accuracy": _mean(valid),
            "validation/avg_length": _mean(batch.tag("num_response_tokens")),
            "validation/truncation_rate": _mean(batch.tag("is_truncated")),
            "validation/num_samples": float(len(batch)),
            **timer.metrics("timing/validation/"),
        }
    )


def _values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    return {name: metric.value for name, metric in metrics.items()}


def _mean(values: tuple[float, ...] | list[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _tag_metrics(batch: KVBatchMeta) -> dict[str, float]:
    """Rewards, advantages and counts of the samples that train."""
    mask = batch.tag("sample_mask")
    rewards, advantages = batch.tag("reward"), batch.tag("advantage")
    errors = batch.tag("mult_prob_error")
    valid_tokens = sum(n for n, m in zip(batch.tag("num_response_tokens"), mask, strict=True) if m)
    return {
        "reward": _mean(rewards),
        "advantages/mean": _mean(advantages),
        "advantages/max": max(advantages),
        "advantages/min": min(advantages),
        "max_seq_mult_prob_error": max(errors),
        "mean_seq_mult_prob_error": _mean(errors),
        "num_masked_seqs_by_logprob_error": float(sum(batch.tag("is_mismatched"))),
        "global_valid_seqs": float(sum(mask)),
        "global_valid_toks": float(valid_tokens),
        **baseline_reward_metrics(rewards, batch.tag("group_id")),
    }


def _performance(
    batch: KVBatchMeta, rollout: RolloutResult, worker_compute_s: float, timing: Mapping[str, float]
) -> dict[str, float]:
    """Where the step's time went. ``overhead_share`` is what is neither generation nor worker compute."""
    total_s = timing["timing/train/total_step_time"]
    num_tokens = sum(batch.lengths)
    return {
        "performance/tokens_per_sec": num_tokens / total_s,
        "performance/samples_per_sec": len(batch) / total_s,
        "performance/generation_s": rollout.generation_s,
        "performance/worker_compute_s": worker_compute_s,
        "performance/overhead_share": 1.0 - (rollout.generation_s + worker_compute_s) / total_s,
    }
