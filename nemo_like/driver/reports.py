"""Builds the metrics of a step under their final names, from tags and from metrics that are already
reduced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from nemo_like.algorithms.advantages import baseline_reward_metrics
from nemo_like.algorithms.rewards import Outcome
from nemo_like.batch.meta import KVBatchMeta
from nemo_like.batch.tags import (
    GROUP_ID,
    IS_JUDGED,
    MULT_PROB_ERROR,
    NUM_RESPONSE_TOKENS,
    OUTCOME,
    POLICY_VERSION,
    REWARD,
    SAMPLE_MASK,
    SHAPED_REWARD,
)
from nemo_like.data_plane.operations import Operation, operation_metrics
from nemo_like.driver.collection import Collected
from nemo_like.driver.ready_groups import ReadyGroups
from nemo_like.driver.stages import mean_advantages
from nemo_like.observability.metrics import Metric
from nemo_like.policy.groups.results import ScoredBatch, TrainUpdate
from nemo_like.tripwires.alarm import Alarm
from nemo_like.tripwires.measured import Measured

# Below this share of their mean square, the variance of returns is a difference of rounded sums.
_LEAST_VARIANCE = 1e-12


@dataclass(frozen=True, slots=True)
class StepReport:
    """The metrics of a step under their final names; see docs/reference/metrics.md."""

    metrics: dict[str, float]
    alarms: tuple[Alarm, ...] = ()  # of the tripwires

    def with_metrics(self, more: Mapping[str, float]) -> StepReport:
        """Return the report with these metrics added."""
        return replace(self, metrics={**self.metrics, **more})


@dataclass(frozen=True, slots=True)
class CriticStep:
    """The results of the critic's stages in one step."""

    valued: ScoredBatch
    update: TrainUpdate


@dataclass(frozen=True, slots=True)
class StepResults:
    """The results of all stages of one training step."""

    batch: KVBatchMeta
    rollout: Collected
    ready: ReadyGroups
    update: TrainUpdate
    weight_sync: Mapping[str, Metric]
    partition_operations: Sequence[Operation]
    critic: CriticStep | None = None


def train_report(results: StepResults, timing: Mapping[str, float]) -> StepReport:
    """Return all metrics that a training step logs; ``timing`` is in seconds, under final names."""
    train = {
        **_values(results.rollout.metrics),
        **_values(results.ready.scored.metrics),
        **_values(results.update.metrics),
        **reward_metrics(results.rollout),
        **_tag_metrics(results.batch),
        **outcome_metrics((results.batch, *results.rollout.dropped)),
    }
    return StepReport(
        {
            **{f"train/{name}": value for name, value in train.items()},
            **critic_metrics(results.critic),
            **{f"weight_sync/{name}": value for name, value in _values(results.weight_sync).items()},
            **timing,
            "timing/train/reward": results.rollout.reward_s,
            "timing/train/rollout_put": results.rollout.put_s,
            **operation_metrics(
                (
                    *results.rollout.operations,
                    *results.ready.taught.operations,
                    *results.update.operations,
                    *(() if results.critic is None else results.critic.update.operations),
                    *results.partition_operations,
                )
            ),
            **_performance(results, timing["timing/train/total_step_time"]),
            **{f"performance/{name}": value for name, value in _values(results.rollout.engines).items()},
        }
    )


def critic_metrics(critic: CriticStep | None) -> dict[str, float]:
    """Return the metrics of a critic, train/value/*; empty without a critic.

    explained_variance is 1 - Var(returns - values) / Var(returns) over the response tokens of samples that
    train, with the values before the step's updates: 1 for a perfect critic, 0 for one that gives every token
    the same value. It is left out when all returns are equal.
    """
    if critic is None:
        return {}
    fit = _values(critic.valued.metrics)
    found = {f"train/value/{name}": value for name, value in _values(critic.update.metrics).items()}
    if fit:
        variance = fit["square_returns"] - fit["returns"] ** 2
        found["train/value/returns"] = fit["returns"]
        if variance > _LEAST_VARIANCE * fit["square_returns"]:
            # What the values leave open, returns - values, are the advantages.
            rest = fit["square_errors"] - fit["errors"] ** 2
            found["train/value/explained_variance"] = 1.0 - rest / variance
    return found


def tripwire_metrics(results: StepResults, canary_gap: float | None) -> dict[str, float]:
    """Return the tripwires' measurements that are worth a curve; empty without tripwires."""
    moved = results.update.measured.get(Measured.weights_moved)
    return {
        **({} if moved is None else {"train/weights_moved": moved.value}),
        **({} if canary_gap is None else {"weight_sync/canary_gap": canary_gap}),
    }


def generation_report(
    batch: KVBatchMeta,
    rollout: Collected,
    partition_operations: Sequence[Operation],
    timing: Mapping[str, float],
) -> StepReport:
    """Return all metrics that a step of a generation-only run logs; ``timing`` as in ``train_report``."""
    train = {
        **_values(rollout.metrics),
        **reward_metrics(rollout),
        **outcome_metrics((batch, *rollout.dropped)),
    }
    return StepReport(
        {
            **{f"train/{name}": value for name, value in train.items()},
            **timing,
            "timing/train/reward": rollout.reward_s,
            "timing/train/rollout_put": rollout.put_s,
            **operation_metrics((*rollout.operations, *partition_operations)),
        }
    )


def _values(metrics: Mapping[str, Metric]) -> dict[str, float]:
    return {name: metric.value for name, metric in metrics.items()}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def reward_metrics(rollout: Collected) -> dict[str, float]:
    """Return mean rewards: ``reward`` over everything generated, ``filtered_reward`` and ``shaped_reward``
    over the groups kept.

    Samples whose reward failed do not count; samples masked for another reason do. A mean over no sample is
    left out. The number of rollouts and the metrics of the groups' baselines come too.
    """
    generated = rollout.generated
    rewards = [reward for part in generated for reward in part.tag(REWARD)]
    group_ids = [group_id for part in generated for group_id in part.tag(GROUP_ID)]
    is_judged = [judged for part in generated for judged in part.tag(IS_JUDGED)]
    kept = rollout.batch.tag(IS_JUDGED)
    return {
        **_masked_mean("reward", rewards, is_judged),
        **_masked_mean("filtered_reward", rollout.batch.tag(REWARD), kept),
        **_masked_mean("shaped_reward", rollout.batch.tag(SHAPED_REWARD), kept),
        "dynamic_sampling_num_gen_batches": float(rollout.num_rollouts),
        **baseline_reward_metrics(rewards, group_ids, sample_mask=is_judged),
    }


def outcome_metrics(batches: Sequence[KVBatchMeta]) -> dict[str, float]:
    """Count the samples that did not train, by reason, except for failed rewards, which are counted
    elsewhere."""
    outcomes = [outcome for batch in batches for outcome in batch.tag(OUTCOME)]
    counted = {
        "num_filtered": Outcome.filtered,
        "num_overlong_filtered": Outcome.overlong,
        "num_masked_seqs_by_logprob_error": Outcome.logprob_mismatch,
        "dynamic_sampling_num_uniform": Outcome.uniform_group,
        "dynamic_sampling_num_surplus": Outcome.surplus_group,
    }
    return {name: float(outcomes.count(outcome.value)) for name, outcome in counted.items()}


def _masked_mean(name: str, values: Sequence[float], mask: Sequence[float]) -> dict[str, float]:
    """Return the mean of the values whose mask is not 0, by ``name``; an empty mapping when every mask is
    0."""
    kept = [value for value, valid in zip(values, mask, strict=True) if valid]
    return {name: _mean(kept)} if kept else {}


def _tag_metrics(batch: KVBatchMeta) -> dict[str, float]:
    """Return the advantages and counts of the samples that train, and the newest policy version of the
    batch."""
    mask, all_advantages = batch.tag(SAMPLE_MASK), mean_advantages(batch)
    advantages = [advantage for advantage, kept in zip(all_advantages, mask, strict=True) if kept]
    valid_tokens = sum(n for n, m in zip(batch.tag(NUM_RESPONSE_TOKENS), mask, strict=True) if m)
    return {
        "policy_version": float(max(batch.tag(POLICY_VERSION))),
        "advantages/mean": _mean(advantages),
        "advantages/max": max(advantages, default=0.0),
        "advantages/min": min(advantages, default=0.0),
        **_sample_errors(batch),
        "global_valid_seqs": float(sum(mask)),
        "global_valid_toks": float(valid_tokens),
    }


def _sample_errors(batch: KVBatchMeta) -> dict[str, float]:
    """Return how far trainer and engine disagree per sample; empty without prev_logprobs."""
    if not batch.has_tag(MULT_PROB_ERROR):
        return {}
    errors = batch.tag(MULT_PROB_ERROR)
    return {"max_seq_mult_prob_error": max(errors), "mean_seq_mult_prob_error": _mean(errors)}


def _performance(results: StepResults, total_s: float) -> dict[str, float]:
    """Return throughput, and how the step's ``total_s`` was spent.

    ``overhead_share`` is the share that was neither generation nor compute of the workers; it may be below 0
    where these overlap. ``trainer_idle_share`` is the share in which no worker computed.
    """
    ready = results.ready
    generation_s = results.rollout.generation_s
    compute_s = ready.scored.compute_s + ready.taught.compute_s
    compute_s += ready.accumulation_s + results.update.compute_s
    if results.critic is not None:
        compute_s += results.critic.valued.compute_s + results.critic.update.compute_s
    return {
        "performance/tokens_per_sec": sum(results.batch.lengths) / total_s,
        "performance/samples_per_sec": len(results.batch) / total_s,
        "performance/generation_s": generation_s,
        "performance/worker_compute_s": compute_s,
        "performance/overhead_share": 1.0 - (generation_s + compute_s) / total_s,
        "performance/trainer_idle_share": 1.0 - compute_s / total_s,
    }
