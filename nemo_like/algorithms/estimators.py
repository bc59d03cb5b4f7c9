"""Advantage estimators by name: one float per sample, from rewards, group ids and masks alone.

Standard library only: the driver calls these on tags. An estimator is any function from
``AdvantageInputs`` to one float per sample; the configuration names one of ``AdvantageEstimatorName``,
or a user's own as "package.module:function". With a KL in the reward a token's advantage is its
sample's less a multiple of what the workers know: the KL of the token and of those after it.
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
class KLToGo:
    """K_t, the KL to the reference of response token t and of all after it, summed over each sample's t."""

    coefficient: float  # beta: token t returns reward - beta K_t
    sums: Sequence[float]  # of K_t, nats; one per sample
    square_sums: Sequence[float]  # of K_t squared


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """N samples in any order; every sequence has one entry per sample."""

    rewards: Sequence[float]  # after scaling and shaping
    group_ids: Sequence[Hashable]  # samples of one prompt share one
    sample_mask: Sequence[float]  # 0: counts in nobody's statistics, and its advantage is 0
    num_response_tokens: Sequence[float]  # weights of an average over tokens
    components: Mapping[str, Sequence[float]] = field(default_factory=dict)  # raw, by name
    kl: KLToGo | None = None  # with a KL in the reward


@dataclass(frozen=True, slots=True)
class Advantages:
    """Token t of a sample has ``per_sample - kl_scale * K_t``."""

    per_sample: Sequence[float]
    kl_scale: float = 0.0


# A user's own gives the floats alone.
AdvantageEstimator = Callable[[AdvantageInputs], Sequence[float] | Advantages]


def build_estimator(cfg: GRPOConfig) -> Callable[[AdvantageInputs], Advantages]:
    """The estimator that ``grpo.adv_estimator.name`` names, its result checked.

    Raises ValueError when the name is neither known nor an import path that exists; the estimator
    itself raises ValueError when it does not give one finite float per sample.
    """
    name = cfg.adv_estimator.name
    if name in AdvantageEstimatorName.__members__:
        estimate = _FACTORIES[AdvantageEstimatorName[name]](cfg)
    else:
        estimate = load_by_path(name)

    def checked(inputs: AdvantageInputs) -> Advantages:
        estimated = estimate(inputs)
        if not isinstance(estimated, Advantages):
            estimated = Advantages(estimated)
        advantages = [float(value) for value in estimated.per_sample]
        if len(advantages) != len(inputs.rewards) or not all(map(math.isfinite, advantages)):
            raise ValueError(
                f"grpo.adv_estimator.name={name} gave {len(advantages)} advantages for "
                f"{len(inputs.rewards)} samples, {sum(map(math.isfinite, advantages))} of them finite; "
                "it must give one finite float per sample"
            )
        return Advantages(advantages, estimated.kl_scale)

    return checked


def reinforce_plus_plus(inputs: AdvantageInputs) -> Advantages:
    """The return itself, whitened over all response tokens of the batch (arXiv 2501.03262).

    A token's return is the reward, less beta times its KL to go where there is one.
    """
    return _whitened_over_tokens(inputs.rewards, inputs)


def reinforce_plus_plus_baseline(inputs: AdvantageInputs) -> Advantages:
    """The same of the reward minus the group's mean (arXiv 2501.03262)."""
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


def _whitened_over_tokens(values: Sequence[float], inputs: AdvantageInputs) -> Advantages:
    """``(x - mean) / sqrt(max(variance, 1e-8))`` of every token's ``x = value - beta K_t``, with the mean and
    the biased variance over all response tokens.

    Masked samples count nothing and get 0, and without a KL so does everybody when all values are equal.

    Raises ValueError when an unmasked value is not finite.
    """
    valid = [i for i, kept in enumerate(inputs.sample_mask) if kept]
    for i in valid:
        if not math.isfinite(values[i]):
            raise ValueError(f"reward of sample {i} is {values[i]}; mask the sample (sample_mask 0) instead")
    tokens, kl = inputs.num_response_tokens, inputs.kl
    num_tokens = math.fsum(tokens[i] for i in valid)
    if not num_tokens or (kl is None and len({values[i] for i in valid}) == 1):
        return Advantages([0.0] * len(values))
    beta = kl.coefficient if kl else 0.0
    kl_sums, kl_squares = (kl.sums, kl.square_sums) if kl else ([0.0] * len(values),) * 2
    mean = math.fsum(tokens[i] * values[i] - beta * kl_sums[i] for i in valid) / num_tokens
    # Of (c - beta K)^2 with c = value - mean, summed over a sample's tokens.
    squares = (
        tokens[i] * (values[i] - mean) ** 2
        - 2 * beta * (values[i] - mean) * kl_sums[i]
        + beta**2 * kl_squares[i]
        for i in valid
    )
    scale = 1.0 / math.sqrt(max(math.fsum(squares) / num_tokens, _MIN_VARIANCE))
    whitened = [0.0] * len(values)
    for i in valid:
        whitened[i] = (values[i] - mean) * scale
    return Advantages(whitened, beta * scale)
