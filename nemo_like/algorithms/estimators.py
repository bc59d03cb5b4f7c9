"""Advantage estimators by name: one float per sample, from rewards, group ids and masks alone.

Standard library only: the driver calls estimators on tags. An estimator is any function from
``AdvantageInputs`` to one float per sample; the configuration names one of ``AdvantageEstimatorName``,
or a user's own as "package.module:function".

With a KL in the reward, the advantages of a sample's tokens differ. The estimator then also returns a
scale; the policy workers, which know the KL of every token, subtract from each token's advantage the scale
times the KL to go (the KL of that token and of all after it in its sample).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from nemo_like.config.import_path import load_by_path
from nemo_like.config.schema import AdvantageEstimatorName, GRPOConfig

# This package has a file for each estimator, named as the configuration names it, with ``build(cfg)``.
_PACKAGE = "nemo_like.algorithms.advantage_estimators"


@dataclass(frozen=True, slots=True, kw_only=True)
class KLToGo:
    """Sums over each sample's response tokens t of K_t, the KL to go: the KL to the reference of token t and
    of all response tokens after it."""

    coefficient: float  # beta: token t returns reward - beta K_t
    sums: Sequence[float]  # of K_t, nats; one per sample
    square_sums: Sequence[float]  # of K_t squared


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """What an estimator computes the advantages of N samples from; every sequence has one entry per sample.

    The samples come in any order.
    """

    rewards: Sequence[float]  # after scaling and shaping
    group_ids: Sequence[Hashable]  # samples of one prompt share one
    sample_mask: Sequence[float]  # 0: counts in nobody's statistics, and its advantage is 0
    num_response_tokens: Sequence[float]  # a sample's weight in an average over tokens
    components: Mapping[str, Sequence[float]] = field(default_factory=dict)  # of the raw reward, by name
    kl: KLToGo | None = None  # None without a KL in the reward


@dataclass(frozen=True, slots=True)
class Advantages:
    """What an estimator returns: token t of sample i has advantage ``per_sample[i] - kl_scale * K_t``."""

    per_sample: Sequence[float]
    kl_scale: float = 0.0


# A user's own estimator may return the floats alone.
AdvantageEstimator = Callable[[AdvantageInputs], Sequence[float] | Advantages]


def build_estimator(cfg: GRPOConfig) -> Callable[[AdvantageInputs], Advantages]:
    """Return the estimator that ``grpo.adv_estimator.name`` names, wrapped so that its result is checked.

    Raises ValueError when the name is neither known nor an import path that exists. The returned
    function raises ValueError when the estimator does not give one finite float per sample.
    """
    name = cfg.adv_estimator.name
    if name in AdvantageEstimatorName.__members__:
        estimate = importlib.import_module(f"{_PACKAGE}.{name}").build(cfg)
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
