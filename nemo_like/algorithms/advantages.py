"""Group-relative advantages: one float per sample, from rewards and group ids alone.

Standard library only: the driver calls this on tags, so nothing here may know of tensors.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

_STD_EPSILON = 1e-6


@dataclass(frozen=True, slots=True)
class GroupBaselines:
    """The mean and the std of the rewards that each sample is compared with, by sample."""

    mean: tuple[float, ...]
    std: tuple[float, ...]  # unbiased; 0 where fewer than two rewards define it


def group_baselines(
    rewards: Sequence[float],
    group_ids: Sequence[Hashable],
    *,
    use_leave_one_out_baseline: bool,
    sample_mask: Sequence[float] | None = None,
) -> GroupBaselines:
    """Compute, for each sample, the mean and the unbiased standard deviation of its group's rewards.

    With ``use_leave_one_out_baseline`` both are taken over the *other* samples of the group. Samples
    whose ``sample_mask`` is 0 enter no mean and no deviation. In a group with fewer than two unmasked
    samples there is nothing to compare: each sample has its own reward as mean, and so an advantage of 0.

    Raises ValueError when the sequences differ in length or an unmasked reward is not finite.
    """
    mask = [1.0] * len(rewards) if sample_mask is None else sample_mask
    _check(rewards, group_ids, mask)
    means, stds = list(rewards), [0.0] * len(rewards)
    for members in _groups(group_ids):
        valid = [i for i in members if mask[i]]
        if len(valid) < 2:
            continue
        shared = _mean_and_std([rewards[i] for i in valid])
        for i in members:
            if use_leave_one_out_baseline:
                means[i], stds[i] = _mean_and_std([rewards[j] for j in valid if j != i])
            else:
                means[i], stds[i] = shared
    return GroupBaselines(tuple(means), tuple(stds))


def group_relative_advantages(
    rewards: Sequence[float],
    group_ids: Sequence[Hashable],
    *,
    normalize_rewards: bool,
    use_leave_one_out_baseline: bool,
    sample_mask: Sequence[float] | None = None,
) -> list[float]:
    """Compute GRPO's advantage of every sample, in sample order.

    An advantage is ``reward - mean`` of the group; ``normalize_rewards`` divides it by ``std + 1e-6``
    where std > 0. Masked samples (``sample_mask`` 0) get 0 and influence no other sample. Other
    arguments and errors are as in ``group_baselines``.
    """
    baselines = group_baselines(
        rewards,
        group_ids,
        use_leave_one_out_baseline=use_leave_one_out_baseline,
        sample_mask=sample_mask,
    )
    advantages = []
    for i, (reward, mean, std) in enumerate(zip(rewards, baselines.mean, baselines.std, strict=True)):
        if sample_mask is not None and not sample_mask[i]:
            advantages.append(0.0)
        elif normalize_rewards and std > 0:
            advantages.append((reward - mean) / (std + _STD_EPSILON))
        else:
            advantages.append(reward - mean)
    return advantages


@dataclass(frozen=True, slots=True)
class GroupSpread:
    """How much the values of judged samples differ within their groups, as sums over the groups."""

    std_sum: float  # unbiased standard deviations of the groups that have at least two judged samples
    num_with_std: int  # groups with at least two judged samples
    num_uniform: int  # judged samples in groups whose values are all equal
    num_judged: int


def group_spread(groups: Iterable[Sequence[float]]) -> GroupSpread:
    """Compute the spread of the judged samples' values, of which ``groups`` has one sequence per group."""
    judged = [values for values in groups if values]
    stds = [_mean_and_std(values)[1] for values in judged if len(values) > 1]
    return GroupSpread(
        std_sum=math.fsum(stds),
        num_with_std=len(stds),
        num_uniform=sum(len(values) for values in judged if len(set(values)) == 1),
        num_judged=sum(map(len, judged)),
    )


def baseline_reward_metrics(
    rewards: Sequence[float], group_ids: Sequence[Hashable], *, sample_mask: Sequence[float] | None = None
) -> dict[str, float]:
    """Compute which per cent of samples are in groups whose rewards are all 0, all 1, not all equal, and all
    equal, and the mean standard deviation of rewards within a group.

    Only groups whose rewards are not all equal carry a gradient. Masked samples are not counted; the result
    is empty when all samples are masked, and has no standard deviation where no group has two samples.
    """
    mask = [1.0] * len(rewards) if sample_mask is None else sample_mask
    _check(rewards, group_ids, mask)
    groups = [[rewards[i] for i in members if mask[i]] for members in _groups(group_ids)]
    spread = group_spread(groups)
    if not spread.num_judged:
        return {}

    def per_cent(reward: float) -> float:
        of_uniform = sum(len(values) for values in groups if set(values) == {reward})
        return 100.0 * of_uniform / spread.num_judged

    pct_uniform = 100.0 * spread.num_uniform / spread.num_judged
    return {
        "baseline_reward/pct_0": per_cent(0.0),
        "baseline_reward/pct_1": per_cent(1.0),
        "baseline_reward/pct_mixed": 100.0 - pct_uniform,
        "baseline_reward/pct_uniform": pct_uniform,
        **({"reward_std": spread.std_sum / spread.num_with_std} if spread.num_with_std else {}),
    }


def _groups(group_ids: Sequence[Hashable]) -> list[list[int]]:
    """Return the positions of each group's samples, which need not be neighbours."""
    groups: dict[Hashable, list[int]] = {}
    for position, group_id in enumerate(group_ids):
        groups.setdefault(group_id, []).append(position)
    return list(groups.values())


def _mean_and_std(values: Sequence[float]) -> tuple[float, float]:
    """Compute mean and unbiased std. Equal values have a std of exactly 0, because rounding must not turn a
    uniform group into a signal."""
    first = values[0]
    if all(value == first for value in values):
        return first, 0.0
    mean = math.fsum(values) / len(values)
    return mean, math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _check(rewards: Sequence[float], group_ids: Sequence[Hashable], mask: Sequence[float]) -> None:
    if not len(rewards) == len(group_ids) == len(mask):
        raise ValueError(
            f"{len(rewards)} rewards, {len(group_ids)} group ids and {len(mask)} sample mask entries: "
            "there must be one of each per sample"
        )
    for i, (reward, kept) in enumerate(zip(rewards, mask, strict=True)):
        if kept and not math.isfinite(reward):
            raise ValueError(f"reward of sample {i} is {reward}; mask the sample (sample_mask 0) instead")
