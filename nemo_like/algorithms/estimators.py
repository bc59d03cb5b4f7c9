"""Advantage estimators by name: one float per sample, from rewards, group ids and masks alone.

Standard library only: the driver calls estimators on tags. An estimator is any function of
``AdvantageInputs`` and the section ``grpo`` of the configuration to one float per sample; the configuration
names one of ``advantage_estimators``, or a user's own as "package.module:function".

With a KL in the reward, the advantages of a sample's tokens differ. The estimator then also returns a
scale; the policy workers, which know the KL of every token, subtract from each token's advantage the scale
times the KL to go (the KL of that token and of all after it in its sample).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from nemo_like.algorithms.options import ESTIMATOR_KINDS, GRPOConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class KLToGo:
    """Sums over each sample's response tokens t of K_t, the KL to go. K_t is the sum of the KL to the
    reference over token t and all response tokens after it."""

    coefficient: float  # beta: token t returns reward - beta K_t
    sums: Sequence[float]  # of K_t, nats; one per sample
    square_sums: Sequence[float]  # of K_t squared


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSums:
    """Sums over each sample's response tokens of their own advantages, which a critic's workers compute."""

    sums: Sequence[float]
    square_sums: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdvantageInputs:
    """The inputs from which an estimator computes the advantages of N samples, one entry per sample.

    The samples come in any order.
    """

    rewards: Sequence[float]  # after scaling and shaping
    group_ids: Sequence[Hashable]  # samples of one prompt share one
    sample_mask: Sequence[float]  # 0: enters no statistics, and its advantage is 0
    num_response_tokens: Sequence[float]  # a sample's weight in an average over tokens
    components: Mapping[str, Sequence[float]] = field(default_factory=dict)  # by name; NaN: it abstains
    kl: KLToGo | None = None  # None without a KL in the reward
    of_tokens: TokenSums | None = None  # None without a critic
    # Values by name of the tags that the estimator is marked to read (batch.tags.reads_tags).
    tags: Mapping[str, Sequence[Any]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Advantages:
    """The result of an estimator: token t of sample i has advantage ``per_sample[i] - kl_scale * K_t``, or
    with a critic ``per_sample[i] + token_scale * GAE_t``."""

    per_sample: Sequence[float]
    kl_scale: float = 0.0
    token_scale: float | None = None  # None without a critic


_MIN_VARIANCE = 1e-8  # of values that are whitened

# An estimator may return the floats alone.
AdvantageEstimator = Callable[..., Sequence[float] | Advantages]


def build_estimator(cfg: GRPOConfig) -> Callable[[AdvantageInputs], Advantages]:
    """Return the estimator that ``grpo.adv_estimator.name`` names, wrapped so that its result is checked.

    Raises ValueError when the name is neither known nor an import path that exists. The returned function
    raises ValueError, which names the first wrong sample, when the estimator does not give one finite float
    per sample.
    """
    key = f"grpo.adv_estimator.name={cfg.adv_estimator.name}"
    estimate: AdvantageEstimator = ESTIMATOR_KINDS.function(cfg.adv_estimator.name)

    def checked(inputs: AdvantageInputs) -> Advantages:
        result = estimate(inputs, cfg, **cfg.adv_estimator.arguments)
        if not isinstance(result, Advantages):
            result = Advantages(result)
        advantages = _numbers(key, result.per_sample)
        if len(advantages) != len(inputs.rewards):
            raise ValueError(
                f"{key} gave {len(advantages)} advantages for {len(inputs.rewards)} samples; it must give "
                "one finite float per sample"
            )
        wrong = [i for i, value in enumerate(advantages) if not math.isfinite(value)]
        if wrong:
            raise ValueError(
                f"{key} gave {len(wrong)} advantages that are not finite, the first of them "
                f"{advantages[wrong[0]]} for sample {wrong[0]} of group {inputs.group_ids[wrong[0]]}, whose "
                f"reward is {inputs.rewards[wrong[0]]:g}; it must give one finite float per sample"
            )
        if result.token_scale is not None and inputs.of_tokens is None:
            raise ValueError(
                f"{key} gave token_scale={result.token_scale}, which scales the advantages of tokens, and "
                "only a critic gives these; leave it out"
            )
        return Advantages(_clipped(advantages, cfg), result.kl_scale, result.token_scale)

    return checked


def _clipped(advantages: list[float], cfg: GRPOConfig) -> list[float]:
    """Limit advantages to [grpo.advantage_clip_low, grpo.advantage_clip_high], where these are set."""
    low = -math.inf if cfg.advantage_clip_low is None else cfg.advantage_clip_low
    high = math.inf if cfg.advantage_clip_high is None else cfg.advantage_clip_high
    return [min(max(value, low), high) for value in advantages]


def _numbers(key: str, values: Any) -> list[float]:
    try:
        return [float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{key} returned {type(values).__name__}, not one float per sample: {error}"
        ) from None


def whitening_scale(variance: float) -> float:
    """Return ``1 / sqrt(max(variance, 1e-8))``, the factor that gives values of this variance a variance of
    1, or less where they hardly differ."""
    return 1.0 / math.sqrt(max(variance, _MIN_VARIANCE))


def whitened_over_tokens(values: Sequence[float], inputs: AdvantageInputs) -> Advantages:
    """Compute ``(x - mean) / sqrt(max(variance, 1e-8))`` of every token's ``x = value - beta K_t``.

    ``values`` has one value per sample; mean and the biased variance are over all response tokens of unmasked
    samples. Masked samples get 0. All samples get 0 when there is no response token, or when, without a KL
    in the reward, all unmasked values are equal.

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
    # For each sample: the sum over its tokens of (c - beta K_t)^2, with c = value - mean.
    squares = (
        tokens[i] * (values[i] - mean) ** 2
        - 2 * beta * (values[i] - mean) * kl_sums[i]
        + beta**2 * kl_squares[i]
        for i in valid
    )
    scale = whitening_scale(math.fsum(squares) / num_tokens)
    whitened = [0.0] * len(values)
    for i in valid:
        whitened[i] = (values[i] - mean) * scale
    return Advantages(whitened, beta * scale)
