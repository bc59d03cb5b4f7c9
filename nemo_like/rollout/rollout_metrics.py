"""The metrics of a rollout's samples, named as in docs/reference/metrics.md without the prefix."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from nemo_like.algorithms.advantages import group_spread
from nemo_like.batch.columns import POLICY_VERSIONS
from nemo_like.environments.interface import ABSTAINED_SHARE, total_reward
from nemo_like.observability.metrics import Metric, maximum, mean, summed
from nemo_like.rollout.conversation import Conversation, EndReason


def rollout_metrics(groups: Sequence[Sequence[Conversation]]) -> dict[str, Metric]:
    """Return lengths, ends and failures over all samples, then rewards and failures of each environment."""
    by_env: dict[str, list[Sequence[Conversation]]] = {}
    for group in groups:  # the samples of a group have one prompt
        by_env.setdefault(group[0].task_prompt.env, []).append(group)
    metrics = _overall([sample for group in groups for sample in group])
    for env, of_env in sorted(by_env.items()):
        metrics |= {f"env/{env}/{name}": metric for name, metric in _of_environment(of_env).items()}
    return metrics


def _overall(samples: Sequence[Conversation]) -> dict[str, Metric]:
    num_samples = len(samples)
    num_failed = sum(sample.failure is not None for sample in samples)
    num_response = [sample.num_response_tokens for sample in samples]
    num_truncated = sum(sample.is_truncated for sample in samples)
    num_out_of_turns = sum(sample.end is EndReason.turn_limit for sample in samples)
    # A sample whose reward failed did not end by itself, though no limit ended it either.
    num_ended = sum(sample.end is EndReason.done and not sample.is_truncated for sample in samples)
    return {
        "mean_prompt_length": mean(sum(len(sample.prompt_ids) for sample in samples), num_samples),
        "mean_gen_tokens_per_sample": mean(sum(num_response), num_samples),
        "max_gen_tokens_per_sample": maximum(max(num_response)),
        "total_num_tokens": summed(sum(sample.num_tokens for sample in samples)),
        "avg_turns_per_sample": mean(sum(sample.num_turns for sample in samples), num_samples),
        "truncation_rate": mean(num_truncated, num_samples),
        "turn_limit_rate": mean(num_out_of_turns, num_samples),
        "natural_termination_rate": mean(num_ended, num_samples),
        "num_failed_rewards": summed(num_failed),
        "failed_reward_share": mean(num_failed, num_samples),
    }


def staleness_metrics(groups: Sequence[Sequence[Conversation]], newest_version: int) -> dict[str, Metric]:
    """Return how stale the response tokens are: by how many policy versions the weights that sampled a token
    are older than ``newest_version``, with which training begins. Mean and maximum, and a count of tokens per
    staleness."""
    versions = [
        passage.columns[POLICY_VERSIONS.name]
        for group in groups
        for sample in group
        for passage in sample.passages
        if passage.logprobs is not None
    ]
    if not versions:
        return {}
    ages, counts = np.unique(newest_version - np.concatenate(versions), return_counts=True)
    return {
        "staleness": mean(float(ages @ counts), int(counts.sum())),
        "max_staleness": maximum(int(ages.max())),
        **{
            f"num_tokens_of_staleness/{age}": summed(count)
            for age, count in zip(ages.tolist(), counts.tolist(), strict=True)
        },
    }


def continued_metrics(groups: Sequence[Sequence[Conversation]]) -> dict[str, Metric]:
    """Return the number of samples with a response that needed more than one request."""
    return {"num_continued_samples": summed(sum(one.num_continued > 0 for group in groups for one in group))}


def _of_environment(groups: Sequence[Sequence[Conversation]]) -> dict[str, Metric]:
    """Return the metrics of one environment's samples.

    Rewards are means over the judged samples; a component's mean leaves out samples in which it abstains. The
    spread within groups comes with them. The environment's own metrics are means over the turns that gave
    them; failures are counted by kind.
    """
    samples = [sample for group in groups for sample in group]
    judged = [sample for sample in samples if sample.failure is None]
    failures = Counter(sample.failure.kind.name for sample in samples if sample.failure)
    abstained = Counter(name for sample in judged for name, value in sample.rewards.items() if value is None)
    rewards = _sums(
        {name: value for name, value in sample.rewards.items() if value is not None} for sample in judged
    )
    own = _sums(sample.metric_sums for sample in samples)
    num_given = _sums(sample.metric_counts for sample in samples)
    num_failed = len(samples) - len(judged)
    of_judged = {
        f"reward/{name}": mean(total, len(judged) - abstained[name])
        for name, total in sorted(rewards.items())
    }
    of_judged |= {
        f"{ABSTAINED_SHARE}/{name}": mean(count, len(judged)) for name, count in sorted(abstained.items())
    }
    if judged:
        of_judged = {"reward": mean(sum(rewards.values()), len(judged)), **of_judged, **_spreads(groups)}
    return {
        **of_judged,
        **{name: mean(total, num_given[name]) for name, total in sorted(own.items())},
        "num_samples": summed(len(samples)),
        "num_failed_rewards": summed(num_failed),
        "failed_reward_share": mean(num_failed, len(samples)),
        **{f"num_failed_rewards/{kind}": summed(count) for kind, count in sorted(failures.items())},
    }


def _spreads(groups: Sequence[Sequence[Conversation]]) -> dict[str, Metric]:
    """Return, for the reward and for each component, the mean standard deviation within a group, and the per
    cent of judged samples whose group has only one value. A component's numbers leave out the samples in
    which it abstains."""
    judged = [[sample.rewards for sample in group if sample.failure is None] for group in groups]
    names = sorted({name for group in judged for rewards in group for name in rewards})
    values = {"": [[total_reward(rewards) for rewards in group] for group in judged]}
    for name in names:
        of_component = [[rewards.get(name, 0.0) for rewards in group] for group in judged]
        values[f"/{name}"] = [[one for one in group if one is not None] for group in of_component]
    metrics: dict[str, Metric] = {}
    for name, of_groups in values.items():
        spread = group_spread(of_groups)
        if spread.num_judged:
            uniform = mean(100.0 * spread.num_uniform, spread.num_judged)
            metrics[f"baseline_reward/pct_uniform{name}"] = uniform
        if spread.num_with_std:
            metrics[f"reward_std{name}"] = mean(spread.std_sum, spread.num_with_std)
    return metrics


def _sums(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            sums[name] = sums.get(name, 0.0) + value
    return sums
