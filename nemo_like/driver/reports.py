"""Metrics of a step and of a validation under their final names, from tags and already reduced parts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from nemo_like.algorithms.advantages import baseline_reward_metrics
from nemo_like.algorithms.masking import MaskedSamples
from nemo_like.data_plane.meta import KVBatchMeta
from nemo_like.observability.metrics import Metric
from nemo_like.policy.results import ScoredBatch, TrainUpdate
from nemo_like.rollout.prompts import RolloutResult


@dataclass(frozen=True, slots=True)
class StepReport:
    """``metrics`` under their final names, see docs/metrics.md."""

    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class ValidationReport:
    metrics: dict[str, float]


@dataclass(frozen=True, slots=True)
class StepResults:
    """What the stages of one step returned."""

    batch: KVBatchMeta
    rollout: RolloutResult
    scored: ScoredBatch
    masked: MaskedSamples
    update: TrainUpdate
    weight_sync: Mapping[str, Metric]


def train_report(results: StepResults, timing: Mapping[str, float]) -> StepReport:
    """Everything a step logs."""
    train = {
        **_values(results.rollout.metrics),
        **_values(results.scored.metrics),
        **_values(results.update.metrics),
        **_tag_metrics(results.batch),
        "num_masked_seqs_by_logprob_error": float(results.masked.num_masked),
    }
    return StepReport(
        {
            **{f"train/{name}": value for name, value in train.items()},
            **{f"weight_sync/{name}": value for name, value in _values(results.weight_sync).items()},
            **timing,
            "timing/train/reward": results.rollout.reward_s,
            "timing/train/rollout_put": results.rollout.put_s,
            **_performance(results, timing["timing/train/total_step_time"]),
        }
    )


def validation_report(rollout: RolloutResult, timing: Mapping[str, float]) -> ValidationReport:
    """Accuracy is the mean reward of samples whose reward did not fail."""
    batch = rollout.batch
    valid = [
        reward
        for reward, mask in zip(batch.numbers("reward"), batch.numbers("sample_mask"), strict=True)
        if mask
    ]
    return ValidationReport(
        {
            "validation/accuracy": _mean(valid),
            "validation/avg_length": _mean(batch.numbers("num_response_tokens")),
            "validation/truncation_rate": _mean(batch.numbers("is_truncated")),
            "validation/num_samples": float(len(batch)),
            **timing,
        }
    )


def _values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    return {name: metric.value for name, metric in metrics.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _tag_metrics(batch: KVBatchMeta) -> dict[str, float]:
    """Rewards, advantages and counts of the samples that train."""
    mask = batch.numbers("sample_mask")
    rewards, advantages = batch.numbers("reward"), batch.numbers("advantage")
    errors = batch.numbers("mult_prob_error")
    valid_tokens = sum(n for n, m in zip(batch.numbers("num_response_tokens"), mask, strict=True) if m)
    return {
        "reward": _mean(rewards),
        "policy_version": float(max(batch.numbers("policy_version"))),
        "advantages/mean": _mean(advantages),
        "advantages/max": max(advantages),
        "advantages/min": min(advantages),
        "max_seq_mult_prob_error": max(errors),
        "mean_seq_mult_prob_error": _mean(errors),
        "global_valid_seqs": float(sum(mask)),
        "global_valid_toks": float(valid_tokens),
        **baseline_reward_metrics(rewards, batch.tag("group_id"), sample_mask=mask),
    }


def _performance(results: StepResults, total_s: float) -> dict[str, float]:
    """Where the step's time went. ``overhead_share`` is what is neither generation nor worker compute."""
    generation_s = results.rollout.generation_s
    compute_s = results.scored.compute_s + results.update.compute_s
    return {
        "performance/tokens_per_sec": sum(results.batch.lengths) / total_s,
        "performance/samples_per_sec": len(results.batch) / total_s,
        "performance/generation_s": generation_s,
        "performance/worker_compute_s": compute_s,
        "performance/overhead_share": 1.0 - (generation_s + compute_s) / total_s,
    }
