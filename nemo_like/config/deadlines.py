"""How long each stage of a step may take."""

from __future__ import annotations

from enum import Enum

from nemo_like.config.schema import ClusterConfig


class Stage(Enum):
    """The stages that have deadlines, by their keys in cluster.stage_timeouts_s."""

    weight_sync = "weight_sync"
    generation = "generation"
    logprobs = "logprobs"
    policy_training = "policy_training"
    checkpoint = "checkpoint"
    validation = "validation"


def deadline_s(cfg: ClusterConfig, stage: Stage) -> float:
    """Its own, or that of every stage."""
    own = getattr(cfg.stage_timeouts_s, stage.name)
    return cfg.stage_timeout_s if own is None else float(own)


def longest_deadline_s(cfg: ClusterConfig) -> float:
    """For what has to last as long as any stage."""
    return max(deadline_s(cfg, stage) for stage in Stage)
