"""Scaling and shaping of rewards before advantages are computed, and the choice of groups worth training on.

Standard library only: the driver calls these on tags.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from enum import Enum

from nemo_like.algorithms.options import RewardScalingConfig, RewardShapingConfig


class Outcome(Enum):
    """Whether a sample trained, as the ledger of samples records it. Every value but ``trained`` is a reason
    why it did not."""

    trained = "trained"
    reward_failed = "reward_failed"  # the environment gave no finite reward
    filtered = "filtered"  # one of grpo.sample_filters refused it
    uniform_group = "uniform_group"  # dynamic sampling: all raw rewards of its group are equal
    surplus_group = "surplus_group"  # dynamic sampling: the step had enough informative groups without it
    overlong = "overlong"  # truncated, with grpo.overlong_filtering=true
    logprob_mismatch = "logprob_mismatch"  # its log-prob error is above grpo.seq_logprob_error_threshold


@dataclass(frozen=True, slots=True, kw_only=True)
class ResponseEnds:
    """How long each sample's responses are, and how they ended; one entry per sample."""

    num_response_tokens: Sequence[float]  # of all turns
    is_truncated: Sequence[float]  # 1: ran into a token limit
    max_response_tokens: Sequence[float]  # of all turns: a response this long gets the full overlong penalty


def scaled_rewards(rewards: Sequence[float], cfg: RewardScalingConfig) -> list[float]:
    """Map rewards linearly from [source_min, source_max] to [target_min, target_max].

    With ``clamp``, rewards outside the source range end up at the nearer end of the target range. Rewards
    stay as they are when scaling is not enabled.
    """
    if not cfg.enabled:
        return list(rewards)
    slope = (cfg.target_max - cfg.target_min) / (cfg.source_max - cfg.source_min)
    if cfg.clamp:
        rewards = [min(max(reward, cfg.source_min), cfg.source_max) for reward in rewards]
    return [cfg.target_min + slope * (reward - cfg.source_min) for reward in rewards]


def shaped_rewards(rewards: Sequence[float], ends: ResponseEnds, cfg: RewardShapingConfig) -> list[float]:
    """Subtract the overlong penalty from each reward, then apply the stop-properly penalty.

    DAPO's overlong penalty (arXiv 2503.14476, eq. 13) counts the tokens of all turns. It is 0 up to
    max_response_tokens - overlong_buffer_length, then grows linearly to overlong_buffer_penalty at
    max_response_tokens, and no more beyond. The stop-properly penalty multiplies a truncated response's
    reward, where it is above 0, by stop_properly_penalty_coef. Rewards stay as they are when shaping is not
    enabled.
    """
    if not cfg.enabled:
        return list(rewards)
    shaped = []
    for reward, tokens, limit, is_truncated in zip(
        rewards, ends.num_response_tokens, ends.max_response_tokens, ends.is_truncated, strict=True
    ):
        value = reward - _overlong_penalty(tokens, limit, cfg)
        if cfg.stop_properly_penalty_coef is not None and is_truncated and value > 0:
            value *= cfg.stop_properly_penalty_coef
        shaped.append(value)
    return shaped


def informative_groups(
    raw_rewards: Sequence[float], group_ids: Sequence[Hashable], sample_mask: Sequence[float]
) -> list[Hashable]:
    """Return the groups in which unmasked samples have different raw rewards, in order of first appearance.

    These are the groups whose raw std is above 0, which dynamic sampling keeps.
    """
    seen: dict[Hashable, set[float]] = {}
    for reward, group_id, kept in zip(raw_rewards, group_ids, sample_mask, strict=True):
        values = seen.setdefault(group_id, set())
        if kept:
            values.add(reward)
    return [group_id for group_id, values in seen.items() if len(values) > 1]


def has_overlong_penalty(cfg: RewardShapingConfig) -> bool:
    """Return whether long responses lose a part of their reward."""
    return cfg.enabled and cfg.overlong_buffer_length is not None


def _overlong_penalty(num_tokens: float, limit: float, cfg: RewardShapingConfig) -> float:
    if cfg.overlong_buffer_length is None:
        return 0.0
    excess = num_tokens - (limit - cfg.overlong_buffer_length)
    return cfg.overlong_buffer_penalty * min(max(excess / cfg.overlong_buffer_length, 0.0), 1.0)
