"""When to validate, and when to write down what was sampled."""

from __future__ import annotations

from nemo_like.config.schema import GRPOConfig, RolloutConfig


def validates_after(step: int, cfg: GRPOConfig) -> bool:
    """Whether to validate after rollout step ``step`` (counted from 1; 0 is before the first)."""
    if step == 0:
        return cfg.val_at_start
    if step == cfg.max_num_steps and cfg.val_at_end:
        return True
    return cfg.val_period > 0 and step % cfg.val_period == 0


def dumps_rollouts_of(step: int, cfg: RolloutConfig) -> bool:
    """Whether the conversations of training step ``step`` are written down."""
    return cfg.dump_period > 0 and step % cfg.dump_period == 0
