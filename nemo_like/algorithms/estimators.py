"""Advantage estimators by name: one float per sample, from rewards, group ids and masks alone.

Standard library only: the driver calls these on tags. An estimator is any function from
``AdvantageInputs`` to one float per sample; the configuration names one of ``AdvantageEstimatorName``,
or a user's own as "package.module:function". With a KL in the reward a token's advantage is its
sample's less a multiple of what the workers know: the KL of the token and of those after it.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field

from nemo_like.config.import_path import load_by_path
from nemo_like.config.schema import AdvantageEstimatorName, GRPOConfig

# A file for each estimator, named as the configuration names it, with ``build(cfg)``.
_PACKAGE = "nemo_like.algorithms.advantage_estimators"


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
