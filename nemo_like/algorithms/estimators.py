"""Advantage estimators by name: one float per sample, from rewards, group ids and masks alone.

Standard library only: the driver calls these on tags. An estimator is any function from
``AdvantageInputs`` to one float per sample; the configuration names one of ``AdvantageEstimatorName``,
or a user's own as "package.module:function".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from nemo_like.algorithms.advantages import group_relative_advantages
from nemo_like.config.import_path import load_by_path
from nemo_like.config.schema import AdvantageEstimatorName, GRPOConfig

_MIN_VARIANCE = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """N samples in any order; every sequence has one entry per sample."""

    rewards: Sequence[float]  # after scaling and shaping
    group_ids: Sequence[Hashable]  # samples of one prompt share one
    sample_mask: Sequence[float]  # 0: counts in nobody's statistics, and its advantage is 0
    num_response_tokens: Sequence[float]  # weights of an average over tokens
    components: Mapping[str, Sequence[float]] = field(default_factory=dict)  # raw, by name


AdvantageEstimator = Callable[[AdvantageInputs], Sequence[float]]


def build_estimator(cfg: GRPOConfig) -> AdvantageEstimator:
    """The estimator that ``grpo.adv_estimator.name`` names, its result checked.

    Raises ValueError when the name is neither known nor an import path that exists; the estimator
    itself raises ValueError when it does not give one finite float per sample.
    """
    name = cfg.adv_estimator.name
    if name in AdvantageEstimatorName.__members__:
        estimate = _FACTORIES[AdvantageEstimatorName[name]](cfg)
    else:
        estimate = load_by_path(name)

    def checked(inputs: AdvantageInputs) -> list[float]:
        advantages = [float(value) for value in estimate(inputs)]
        if len(advantages) != len(inputs.rewards) or not all(map(math.isfinite, advantages)):
            raise ValueError(
                f"grpo.adv_estimator.name={name} gave {len(advantages)} advantages for "
                f"{len(inputs.rewards)} samples, {sum(map(math.isfinite, advantages))} of them finite; "
                "it must give one finite float per sample"
            )
        return advantages

    return checked


def reinforce_plus_plus(inputs: AdvantageInputs) -> list[float]:
    """The reward itself, whitened over all response tokens of the batch (arXiv 2501.03262)."""
    return _whitened_over_tokens(inputs.rewards, inputs)


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> list[float]:
    """Reward minus the group's mean, whitened over all response tokens of the batch (arXiv 2501.03262)."""
    centred = group_relative_advantages(
        inputs.rewards,
        inputs.group_ids,
        normalize_rewards=False,
        use_leave_one_out_baseline=False,
        sample_mask=inputs.sample_mask,
    )
    return _whitened_over_tokens(centred, inputs)


def rloo(inputs: AdvantageInputs) -> list[float]:
    """Reward minus the mean of the group's other rewards (arXiv 2402.14740); 0 where there is no other."""
    return group_relative_advantages(
        inputs.rewards,
        inputs.group_ids,
        normalize_rewards=False,
        use_leave_one_out_baseline=True,
        sample_mask=inputs.sample_mask,
    )


def gdpo(inputs: AdvantageInputs, weights: Mapping[str, float]) -> list[float]:
    """Each reward component normalised in its group, their weighted sum normalised over the batch.

    ``A = (s - mean(s)) / (std(s) + 1e-6)`` with ``s = sum_k w_k (r_k - mean_group) / (std_group + 1e-6)``,
    both std unbiased (arXiv 2601.05242). A component that is uniform in a group adds nothing there.

    Raises ValueError when the inputs lack a component that has a weight.
    """
    absent = sorted(weights.keys() - inputs.components.keys())
    if absent:
        raise ValueError(
            f"grpo.adv_estimator.reward_weights names {', '.join(absent)}, which the samples do not have; "
            f"they have {', '.join(sorted(inputs.components)) or 'no components'}"
        )
    sums = [0.0] * len(inputs.rewards)
    for name, weight in weights.items():
        normalized = group_relative_advantages(
            inputs.components[name],
            inputs.group_ids,
            normalize_rewards=True,
            use_leave_one_out_baseline=False,
            sample_mask=inputs.sample_mask,
        )
        sums = [total + weight * value for total, value in zip(sums, normalized, strict=True)]
    return group_relative_advantages(
        sums,
        ["the whole batch"] * len(sums),
        normalize_rewards=True,
        use_leave_one_out_baseline=False,
        sample_mask=inputs.sample_mask,
    )


def _grpo(cfg: GRPOConfig) -> AdvantageEstimator:
    return lambda inputs: group_relative_advantages(
        inputs.rewards,
        inputs.group_ids,
        normalize_rewards=cfg.normalize_rewards,
        use_leave_one_out_baseline=cfg.use_leave_one_out_baseline,
        sample_mask=inputs.sample_mask,
    )


_FACTORIES: dict[AdvantageEstimatorName, Callable[[GRPOConfig], AdvantageEstimator]] = {
    AdvantageEstimatorName.grpo: _grpo,
    AdvantageEstimatorName.rloo: lambda cfg: rloo,
    AdvantageEstimatorName.reinforce_plus_plus: lambda cfg: reinforce_plus_plus,
    AdvantageEstimatorName.reinforce_plus_plus_baseline: lambda cfg: reinforce_plus_plus_baseline,
    AdvantageEstimatorName.gdpo: lambda cfg: lambda inputs: gdpo(inputs, cfg.adv_estimator.reward_weights),
}


def _whitened_over_tokens(values: Sequence[float], inputs: AdvantageInputs) -> list[float]:
    """``(value - mean) / sqrt(max(variance, 1e-8))``, each sample weighted by its response tokens.

    The variance is the biased one. Masked samples count nothing and get 0, and so does everybody when
    all values are equal.

    Raises ValueError when an unmasked value is not finite.
    """
    weights = [
        tokens if kept else 0.0
        for tokens, kept in zip(inputs.num_response_tokens, inputs.sample_mask, strict=True)
    ]
    valid = [i for i, kept in enumerate(inputs.sample_mask) if kept]
    for i in valid:
        if not math.isfinite(values[i]):
            raise ValueError(f"reward of sample {i} is {values[i]}; mask the sample (sample_mask 0) instead")
    num_tokens = math.fsum(weights)
    if not num_tokens or len({values[i] for i in valid}) == 1:
        return [0.0] * len(values)
    mean = math.fsum(weights[i] * values[i] for i in valid) / num_tokens
    variance = math.fsum(weights[i] * (values[i] - mean) ** 2 for i in valid) / num_tokens
    scale = 1.0 / math.sqrt(max(variance, _MIN_VARIANCE))
    whitened = [0.0] * len(values)
    for i in valid:
        whitened[i] = (values[i] - mean) * scale
    return whitened
