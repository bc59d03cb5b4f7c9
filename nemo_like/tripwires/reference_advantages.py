"""Computes advantages from the formulas of docs/explanation/rewards.md, to compare training's with them.

    grpo       (r - m) / (s + 1e-6), where s > 0       m, s: mean and unbiased deviation of the group
    rloo       r - mean of the group's other rewards
    gdpo       grpo's for each component, weighted and summed; then normalised once more over the batch
    reinforce_plus_plus(_baseline)     (x - M) / sqrt(max(V, 1e-8)) over tokens; x = r, or r - m

Masked samples count nowhere and get 0. Plain Python that shares no code with ``algorithms``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from nemo_like.algorithms.estimator_kind import estimator_kind_of
from nemo_like.algorithms.options import GRPOConfig
from nemo_like.config.import_path import load_by_path

_EPSILON = 1e-6
_LEAST_VARIANCE = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardedSamples:
    """The rewards of N samples; every sequence has one entry per sample."""

    rewards: Sequence[float]  # after shaping
    groups: Sequence[int]  # number of the prompt
    trains: Sequence[bool]
    num_tokens: Sequence[float]  # of the response
    components: Mapping[str, Sequence[float]] = field(default_factory=dict)
    kl_coefficient: float = 0.0  # above 0 where the reward has a KL term; then the sums below are given
    kl_sums: Sequence[float] = ()  # per sample, the sum of K_t over its tokens
    kl_square_sums: Sequence[float] = ()  # per sample, the sum of K_t^2


def reference_advantages(samples: RewardedSamples, cfg: GRPOConfig) -> list[float] | None:
    """Return the N advantages by the configured estimator's formula; None for a user's own estimator."""
    path = estimator_kind_of(cfg).reference
    if path is None:
        return None
    found: list[float] = load_by_path(path)(samples, cfg)
    if (low := cfg.advantage_clip_low) is not None:
        found = [value if value > low else low for value in found]
    if (high := cfg.advantage_clip_high) is not None:
        found = [value if value < high else high for value in found]
    return found


def relative(samples: RewardedSamples, cfg: GRPOConfig) -> list[float]:
    """Return GRPO's advantages, with the baseline and the normalisation that the keys choose."""
    return _relative(samples.rewards, samples, cfg.normalize_rewards, cfg.use_leave_one_out_baseline)


def leave_one_out(samples: RewardedSamples, cfg: GRPOConfig) -> list[float]:
    """Return RLOO's advantages."""
    return _relative(samples.rewards, samples, normalized=False, leaves_one_out=True)


def whitened(samples: RewardedSamples, cfg: GRPOConfig) -> list[float]:
    """Return REINFORCE++'s advantages."""
    return _whitened(samples.rewards, samples)


def whitened_in_groups(samples: RewardedSamples, cfg: GRPOConfig) -> list[float]:
    """Return the advantages of REINFORCE++ with the mean of the group as baseline."""
    return _whitened(_relative(samples.rewards, samples, normalized=False, leaves_one_out=False), samples)


def weighted_components(samples: RewardedSamples, cfg: GRPOConfig) -> list[float]:
    """Return GDPO's advantages."""
    total = [0.0] * len(samples.rewards)
    for component, weight in cfg.adv_estimator.reward_weights.items():
        values = samples.components[component]
        # A component that abstains is NaN.
        judges = [
            trains and not math.isnan(value) for trains, value in zip(samples.trains, values, strict=True)
        ]
        part = _relative(values, replace(samples, trains=judges), normalized=True, leaves_one_out=False)
        total = [so_far + weight * value for so_far, value in zip(total, part, strict=True)]
    batch = RewardedSamples(
        rewards=total, groups=[0] * len(total), trains=samples.trains, num_tokens=samples.num_tokens
    )
    return _relative(total, batch, normalized=True, leaves_one_out=False)


def _relative(
    values: Sequence[float], samples: RewardedSamples, normalized: bool, leaves_one_out: bool
) -> list[float]:
    members: dict[int, list[int]] = {}
    for index, (group, trains) in enumerate(zip(samples.groups, samples.trains, strict=True)):
        if trains:
            members.setdefault(group, []).append(index)
    advantages = [0.0] * len(values)
    for indexes in members.values():
        if len(indexes) < 2:
            continue
        mean, divisor = _mean_and_divisor([values[index] for index in indexes])
        for index in indexes:
            if leaves_one_out:
                mean, divisor = _mean_and_divisor([values[other] for other in indexes if other != index])
            advantages[index] = (values[index] - mean) / (divisor if normalized else 1.0)
    return advantages


def _mean_and_divisor(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean, and the unbiased standard deviation plus 1e-6, or 1 in its place where all are
    equal."""
    mean = math.fsum(values) / len(values)
    if min(values) == max(values):
        return values[0], 1.0
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)) + _EPSILON


def _whitened(values: Sequence[float], samples: RewardedSamples) -> list[float]:
    trains = [index for index, one in enumerate(samples.trains) if one]
    num_tokens = math.fsum(samples.num_tokens[index] for index in trains)
    beta = samples.kl_coefficient
    is_uniform = not beta and len({values[index] for index in trains}) == 1
    if not num_tokens or is_uniform:
        return [0.0] * len(values)
    sums = samples.kl_sums if beta else [0.0] * len(values)
    squares = samples.kl_square_sums if beta else sums
    mean = math.fsum(samples.num_tokens[i] * values[i] - beta * sums[i] for i in trains) / num_tokens
    variance = (
        math.fsum(
            samples.num_tokens[i] * (values[i] - mean) ** 2
            - 2 * beta * sums[i] * (values[i] - mean)
            + beta * beta * squares[i]
            for i in trains
        )
        / num_tokens
    )
    deviation = math.sqrt(max(variance, _LEAST_VARIANCE))
    kept = set(trains)
    return [(value - mean) / deviation if i in kept else 0.0 for i, value in enumerate(values)]
